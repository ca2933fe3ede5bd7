"""Comparison of several runs: methods x seeds, and the report on their differences."""
