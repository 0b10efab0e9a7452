"""What sessions survive: losses, moves, storms, elections, roaming volunteers."""
