"""docs/tour.md: one task's way through both methods."""
