"""What the gateway does for a request: models, prompts, choices, the pieces of answers."""
