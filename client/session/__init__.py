"""One session at its client: events in, effects out, and the shell that performs them."""
