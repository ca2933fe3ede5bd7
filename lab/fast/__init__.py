"""The same passes and replies as the core's, sooner on a CPU."""
