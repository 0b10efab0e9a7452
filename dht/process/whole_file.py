"""Writes a file whole or not at all, so that a crash or a full disk leaves no half of it."""

import os
import secrets
from pathlib import Path


def write_whole(path: Path, content: bytes) -> None:
    """Replace ``path`` by ``content``. Raises OSError, and then ``path`` is as it was."""
    beside = path.with_name(f".{path.name[:64]}.{secrets.token_hex(4)}")
    try:
        beside.write_bytes(content)
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
