"""Put on PYTHONPATH of a process: hivemind and uvloop are not installed there, and none gets in.

Modules of Python's own that Windows lacks are not there either, but for what libraries need.

Python imports a module of this name at its start. The process ends with exit code 70 if one of
them was loaded nevertheless.
"""

import atexit
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder

HIDDEN = frozenset({"hivemind", "uvloop"})
UNIX_ONLY = frozenset({"fcntl", "grp", "readline", "termios", "tty", "pty"})
_find = PathFinder.find_spec


def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
    """What Python finds, but for the hidden ones."""
    return None if name.partition(".")[0] in HIDDEN | UNIX_ONLY else _find(name, path, target)  # type: ignore[arg-type]


PathFinder.find_spec = find_spec  # type: ignore[method-assign, assignment]


@atexit.register
def check() -> None:
    """None of the hidden ones is there."""
    loaded = sorted(HIDDEN & sys.modules.keys())
    if loaded:
        sys.stderr.write(f"loaded: {loaded}\n")
        sys.stderr.flush()
        os._exit(70)
