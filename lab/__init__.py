"""Extensions of coevolve.py: baselines, evaluation of chat endpoints, studies with several methods
and seeds, reports, and an HTML page for each run."""

import common  # noqa: F401, sets sys.excepthook before any other package is imported
