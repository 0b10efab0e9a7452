"""Measures how fast this machine runs layers, fits the times, and keeps them for the next join."""
