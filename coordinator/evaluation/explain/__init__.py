"""What a placement waits for, whom it cannot lose, and what one more peer would bring."""
