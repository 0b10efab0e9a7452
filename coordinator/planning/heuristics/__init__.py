"""Placements without a solver: what fits, greedy planners, repairs."""
