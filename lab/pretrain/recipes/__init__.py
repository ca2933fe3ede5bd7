"""Practice texts of the built-in environments, a file each."""
