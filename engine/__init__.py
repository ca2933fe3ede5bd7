"""Infrastructure for coevolve.py, dpo.py and envs.py: generation, training runs, rollouts, files.

Each module covers one topic and can be read on its own.
"""
