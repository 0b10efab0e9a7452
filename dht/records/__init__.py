"""Signed records: checking, keeping, reading and writing them, and asking full peers for them."""
