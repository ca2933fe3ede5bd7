"""Extensions of coevolve.py: baselines, evaluation of chat endpoints, studies with several methods
and seeds, reports, and an HTML page for each run."""
