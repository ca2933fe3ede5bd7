"""Extensions of the method in coevolve.py: further settings, methods and models, evaluation of chat
endpoints, studies of several runs, the page of a run, and reports."""
