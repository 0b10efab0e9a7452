"""Whether a file with secrets is its owner's alone."""

import os
import stat
from pathlib import Path

from dht.errors import UserError


def check_private(file: Path, what: str) -> None:
    """Raises UserError where other users may read or change ``file``, which is ``what``; OSError
    where there is none. On Windows nothing is checked."""
    mode = stat.S_IMODE(file.stat().st_mode)
    if os.name == "posix" and mode & 0o077:
        raise UserError(
            f"{what} {file} has mode {mode:03o}, other users can read it; run: chmod 600 {file}"
        )
