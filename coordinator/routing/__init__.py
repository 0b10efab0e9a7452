"""Which peers run one session, and when it should move."""
