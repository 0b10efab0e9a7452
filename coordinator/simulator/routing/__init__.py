"""Choosing routes in a simulation: as this project, as Helix, as Swarm, over pipelines."""
