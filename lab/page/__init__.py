"""Views of a run: its page, its tables and its figures."""

import os

# A notebook sets a backend that this interpreter may lack. Figures are only written to files, so
# agg suffices.
os.environ["MPLBACKEND"] = "agg"
