"""Rollouts and evaluation by an inference server, such as vLLM: `--serve COMMAND`."""
