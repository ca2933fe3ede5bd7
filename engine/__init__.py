"""Infrastructure of the training scripts: generation, training runs, rollouts and files.

Each module covers one topic and can be read on its own.
"""
