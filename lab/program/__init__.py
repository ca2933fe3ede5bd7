"""The program around a run: start and end, the run itself, its tasks, plans before it."""
