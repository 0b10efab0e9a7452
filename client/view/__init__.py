"""A consumer's view of the swarm: who serves, who answers pings, whom to avoid, which routes."""
