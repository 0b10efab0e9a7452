"""Decisions on a swarm as pure functions, the shell that performs them, and a simulator."""
