"""Adapter: py-libp2p alone."""
