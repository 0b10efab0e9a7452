"""The user's own directory, which a service or a container may lack."""

import atexit
import os
import shutil
import tempfile
from functools import cache
from pathlib import Path

from dht.errors import UserError


def home_directory() -> Path | None:
    """The user's home directory; None where the system knows none."""
    try:
        return Path.home()
    except (RuntimeError, KeyError):
        return None


def at_home(path: Path, flag: str) -> Path:
    """``path`` with its leading ``~`` replaced. Raises UserError, which says to give ``flag``,
    where there is no such home directory or the path names no file."""
    if not path.name:
        raise UserError(f"{flag.partition(' ')[0]} names no file: {str(path)!r}")
    try:
        return path.expanduser()
    except (RuntimeError, KeyError):
        raise UserError(
            f"{path}: this user has no home directory; give another path with {flag}, or set HOME"
        ) from None


def cache_directory(name: str) -> Path:
    """``$XDG_CACHE_HOME/anabranch/<name>``, by default below ``~/.cache``; without a home
    directory, one of this process's own, which goes with it."""
    named = os.environ.get("XDG_CACHE_HOME")
    home = home_directory()
    base = Path(named).expanduser() if named else home / ".cache" if home else passing_directory()
    return base / "anabranch" / name


@cache
def passing_directory() -> Path:
    """A directory of this process's own, which goes with it."""
    directory = tempfile.mkdtemp(prefix="anabranch-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return Path(directory)
