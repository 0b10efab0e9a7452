"""Sessions at a stage: their progress, their table, and admission."""
