"""Several runs: methods by seeds, and the report that compares them."""
