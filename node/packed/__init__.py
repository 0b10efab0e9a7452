"""Weights in the bits that a checkpoint publishes: what they mean, and products with them."""
