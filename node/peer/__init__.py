"""A volunteer's process: its options, announcing, following plans, balancing, draining."""
