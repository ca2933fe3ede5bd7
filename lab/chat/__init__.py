"""Evaluation and exploration with something other than an agent in training: a fixed agent, a model
at a chat endpoint, or a person at the terminal."""
