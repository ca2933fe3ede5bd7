"""The HTML page of a run, with tables and figures of its results."""

import os

# A notebook sets MPLBACKEND for its subprocesses, to a backend that may not be installed here. The
# agg backend is always available, and suffices because figures are only written to files.
os.environ["MPLBACKEND"] = "agg"
