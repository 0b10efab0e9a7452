"""Simulated links: the project's scheduler slice by slice or in closed form, and in order."""
