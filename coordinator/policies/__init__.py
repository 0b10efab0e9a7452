"""Decisions of live peers and the simulator: admission, batches, failure, links, routes."""
