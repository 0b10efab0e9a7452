"""Refuses a commit whose subject is too long: ``python -m tests.commit_subject MESSAGE_FILE``."""

import sys
from pathlib import Path

SUBJECT_MAX = 72
"""Most characters of a subject; Git's own tools cut longer ones."""


def complaint(message: str) -> str | None:
    """What is wrong with a commit message, if something is."""
    subject = next((line for line in message.splitlines() if line and line[0] != "#"), "")
    if not subject:
        return "the commit has no subject"
    if len(subject) > SUBJECT_MAX:
        return f"the subject has {len(subject)} characters, at most {SUBJECT_MAX}: {subject}"
    return None


if __name__ == "__main__":
    if said := complaint(Path(sys.argv[1]).read_text()):
        sys.exit(f"error: {said}")
