"""Several runs: methods x seeds, their numbers, one report."""
