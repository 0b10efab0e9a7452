"""Runs a range of layers of a transformers model: structure, filling, forward, graphs."""
