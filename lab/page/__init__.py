"""What a run shows: its closing table, its page and the figures."""
