"""The choice of the peers that run a session, and of the sessions that should move."""
