"""Simulated links: the project's scheduler frame by frame, or in closed form."""
