"""The machinery beneath coevolve.py, dpo.py and envs.py.

Each module is about one topic and can be read by itself.
"""
