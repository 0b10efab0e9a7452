"""Whether a stranger's grammar can be followed: found out apart, in turns, and remembered."""
