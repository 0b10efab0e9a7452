"""Streams between stages: send order, probes, reachability, relays, rows as bytes."""
