"""Faults of the world around a peer: its clock, cable, process ids and memory."""
