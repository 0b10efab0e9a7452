"""One session at its owner: events in, effects out, and the shell that performs them."""
