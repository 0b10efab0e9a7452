"""Writes a file whole or not at all: a crash, a full disk or a loss of power leaves no half. Tells
whether one has been written since."""

import os
import secrets
from pathlib import Path

Stamp = tuple[int, int, int]
"""What changes where a file is written or replaced: its number, size and time of change."""


def stamp_of(path: Path) -> Stamp:
    """The stamp of a file; raises OSError."""
    said = path.stat()
    return said.st_ino, said.st_size, said.st_mtime_ns


def write_whole(path: Path, content: bytes, *, lasting: bool = True) -> None:
    """Replace ``path`` by ``content``. Raises OSError, and then ``path`` is as it was.

    ``lasting``: also where the machine loses power now. Some file systems write a file's new name
    before its content. Not for what is written every few seconds and says nothing after a start.
    """
    beside = path.with_name(f".{path.name[:64]}.{secrets.token_hex(4)}")
    try:
        with beside.open("wb") as opened:
            opened.write(content)
            if lasting:
                opened.flush()
                os.fsync(opened.fileno())
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
