"""How much of the code a reader has to walk through to follow one thing from end to end."""
