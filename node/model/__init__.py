"""Runs a range of layers of a transformers model: built from its configuration, filled, opened."""
