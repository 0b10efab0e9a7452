"""Streams to other stages: send order, probes, reachability, relays, rows as bytes."""
