"""Tensors: what makes `dpo.py` fast and large and changes no number. It knows no settings."""
