"""Benchmarks and the demo: each prints what it measured and writes it as JSON."""
