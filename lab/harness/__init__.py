"""A run: its settings, its folder, its machine, how it is played and reported."""
