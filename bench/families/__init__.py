"""Which model families and checkpoint formats run, and how exactly."""
