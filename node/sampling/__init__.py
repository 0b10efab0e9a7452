"""Picks tokens from the head's logits: penalties, the draw, log probabilities."""
