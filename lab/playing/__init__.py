"""Episodes: by a model in many slots at once, or by whoever answers in text."""
