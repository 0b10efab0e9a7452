"""The shared types, messages and records of a swarm, and the transports between its peers."""
