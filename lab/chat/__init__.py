"""Evaluation and exploration without training. Episodes are played by a trained agent, by a model
at a chat endpoint, or by a person at the terminal."""
