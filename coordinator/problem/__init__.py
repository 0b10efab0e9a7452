"""The planner's input: from records or a cluster file, with the machines' speeds."""
