"""Evaluation of a placement: what it can carry, what it would serve, and whether it is legal."""
