"""Base models: the shipped tiny one, and SmolLM2 from a package index."""
