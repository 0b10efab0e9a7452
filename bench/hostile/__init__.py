"""Attacks on real peers, and what they cost the honest side."""
