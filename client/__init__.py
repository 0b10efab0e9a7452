"""A consumer of the swarm: sessions, text generation and tokens. It holds no weights."""
