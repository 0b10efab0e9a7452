"""The public health page: one look says whether a swarm is healthy, and why."""
