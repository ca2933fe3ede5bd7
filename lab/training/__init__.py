"""Models in and out of memory: what can be used, loading, training phases, saving."""
