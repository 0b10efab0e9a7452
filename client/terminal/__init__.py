"""A conversation on a terminal: what is typed, how an answer grows, what happens to its route."""
