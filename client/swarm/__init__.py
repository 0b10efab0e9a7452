"""The face of a swarm: connect, ask, stream."""
