"""The life of a published plan: who makes it, transition, review, store, trust."""
