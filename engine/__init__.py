"""What the method runs on. Each file is about one thing, and can be read alone."""
