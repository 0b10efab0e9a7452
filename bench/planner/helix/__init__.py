"""Helix's exact programs and a search by flow alone, to compare with."""
