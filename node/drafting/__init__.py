"""Drafts of a session's next tokens at the first stage, and how many of them pay."""
