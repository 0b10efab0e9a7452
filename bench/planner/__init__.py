"""What plans serve: the planner that lives beside its rivals, by the living rules and on paper."""
