"""ScienceWorld, in its simulator."""
