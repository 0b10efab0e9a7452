"""Which rows an engine runs in its next step."""
