"""Files with secrets, which are their owner's alone."""

import os
import stat
import tempfile
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


def write_private(file: Path, content: bytes, *, keeps: bool = False) -> None:
    """Write ``file`` whole, for its owner alone; ``keeps``: one that is there by now stays.

    It is written under another name first: a crash must not leave half of it. Raises OSError.
    """
    handle, name = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)  # mode 600
    try:
        with os.fdopen(handle, "wb") as opened:
            opened.write(content)
            opened.flush()
            os.fsync(opened.fileno())
        try:
            if keeps:
                os.link(name, file)  # which fails where there is one
                return
        except FileExistsError:
            return
        except OSError:  # a file system without links
            pass
        os.replace(name, file)
    finally:
        Path(name).unlink(missing_ok=True)
