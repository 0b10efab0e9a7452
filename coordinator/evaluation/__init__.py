"""What a placement can carry, what it would serve, and whether it is legal."""
