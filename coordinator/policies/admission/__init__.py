"""Who is let in at a stage, how much of its KV a session may take, and who gives way. Pure."""
