"""Tells a peer's owner that the software was changed while the peer runs.

A process loads parts of it when it first needs them, and starts others as processes of their own.
After an upgrade these are of another version than what runs, and may not fit it.
"""

import asyncio
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dht.process.whole_file import Stamp, stamp_of
from node.owner.reporter import Reporter


@dataclass(frozen=True, slots=True, kw_only=True)
class InstalledConfig:
    """How often the files are looked at."""

    look_s: float = 60.0
    """A look at some hundred files takes a millisecond."""


INSTALLED = InstalledConfig()
COMPONENTS = frozenset({"anabranch", "client", "coordinator", "dht", "node"})
ROOT = Path(__file__).resolve().parents[2]
CHANGED = (
    "The software was changed on the disk while this peer runs the old one. Start it again: parts"
    " that are loaded later may not fit."
)


def have_changed(seen: dict[Path, Stamp | None]) -> bool:
    """Whether a file of a module that this process has loaded was written, replaced or removed
    since it was first looked at; ``seen`` keeps how it was then."""
    now = {path: _stamp(path) for path in loaded_files()}
    return any(stamp != seen.setdefault(path, stamp) for path, stamp in now.items())


def loaded_files() -> Iterator[Path]:
    """The files of this software's modules that this process has loaded."""
    for name, module in [*sys.modules.items()]:
        file = getattr(module, "__file__", None)
        if name.partition(".")[0] in COMPONENTS and file and Path(file).is_relative_to(ROOT):
            yield Path(file)


def _stamp(path: Path) -> Stamp | None:
    try:
        return stamp_of(path)
    except OSError:
        return None


async def keep_looking(reporter: Reporter) -> None:
    """Look until the software has changed, and say so."""
    seen: dict[Path, Stamp | None] = {}
    have_changed(seen)
    while True:
        await asyncio.sleep(INSTALLED.look_s)
        if await asyncio.to_thread(have_changed, seen):
            reporter.event("outdated")
            reporter.say(CHANGED)
            return
