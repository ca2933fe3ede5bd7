"""What a run shows: its page and the figures."""

import os

# A notebook sets a backend that this interpreter may lack. Figures are only written to files.
os.environ["MPLBACKEND"] = "agg"
