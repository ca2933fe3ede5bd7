"""BFCL v3 multi-turn, on the simulators of the package bfcl-eval."""
