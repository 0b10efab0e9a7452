"""Finds out how a model is put together, from its code, without its weights."""
