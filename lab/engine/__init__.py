"""Tensors: what makes `tokens.py` fast and large and changes no number. It knows no settings."""
