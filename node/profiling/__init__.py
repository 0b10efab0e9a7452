"""How fast this machine runs layers: measured, fitted, kept for the next join."""
