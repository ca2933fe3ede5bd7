"""To look at: a run as one page (`page.py`), an environment or an agent played in the terminal."""
