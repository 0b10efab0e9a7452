"""The life of a published plan: waves, transition, review, store, trust."""
