"""What a peer knows of itself, in a small file for whoever watches it: a container's health check.

A port that is open says little: the p2p daemon holds it, whatever has become of the peer. The file
is written on the peer's event loop, so it grows old where that stands still. Its time is that of
the steady clock, which all processes of a machine share and nobody sets.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from dht.process.json_file import decode_json
from dht.process.whole_file import write_whole

logger = logging.getLogger(__name__)

WRITE_S = 5.0
STALE_S = 30.0
"""Age above which the peer that wrote the file stands still, or is gone: six writes are missing."""
FILE_BYTES_MAX = 4096


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """What one peer said of itself, and when by the machine's steady clock."""

    steady_s: float
    trouble: str = ""
    """What is wrong; empty where it is well, or is still starting."""


def health_file(identity: Path) -> Path:
    """The file of the peer with that identity."""
    return identity.with_suffix(".health.json")


@dataclass(slots=True)
class HealthKeeper:
    """Keeps the file up to date."""

    path: Path
    trouble: Callable[[], str] = lambda: ""
    """What is wrong now, in words; empty where the peer is well, or is starting."""
    _mine: bool = False
    """Whether this process wrote the file: that of a peer that runs is left to it. A second process
    with one identity is refused, but only after it has looked at the model."""

    async def run(self) -> None:
        """Write until cancelled, and then remove the file."""
        try:
            while True:
                self._write()
                await asyncio.sleep(WRITE_S)
        finally:
            if self._mine:
                with suppress(OSError):
                    self.path.unlink()

    def _write(self) -> None:
        if not self._mine and _read(self.path, time.monotonic()) is not None:
            return
        health = Health(steady_s=time.monotonic(), trouble=self.trouble()[: FILE_BYTES_MAX // 4])
        try:
            write_whole(self.path, msgspec.json.encode(health) + b"\n")
            self._mine = True
        except OSError as error:
            logger.info("%s cannot be written: %s", self.path.name, error.strerror)


def why_unwell(path: Path, now_s: float) -> str:
    """What is wrong with the peer of that file at ``now_s`` by the steady clock; empty where it is
    well."""
    if not path.exists():
        return "no peer runs with that identity"
    health = _read(path, now_s)
    if health is None:
        return f"the peer has said nothing for over {STALE_S:.0f} s"
    return health.trouble


def _read(path: Path, now_s: float) -> Health | None:
    """What a peer said within the last ``STALE_S``; None where it said nothing."""
    try:
        with path.open("rb") as file:
            health = decode_json(file.read(FILE_BYTES_MAX), Health)
    except (OSError, ValueError):
        return None
    return health if 0 <= now_s - health.steady_s <= STALE_S else None
