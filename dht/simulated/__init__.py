"""Adapter: a network and a clock within one process."""
