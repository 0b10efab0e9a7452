"""Attention of a step's rows over the KV pool, in plain torch."""
