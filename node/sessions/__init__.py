"""The sessions at a stage: each one's progress, their table, who is admitted."""
