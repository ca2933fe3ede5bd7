"""InterCodeSQL: generated databases, or those of InterCode."""
