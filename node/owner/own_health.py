"""What a peer knows of itself, in a small file for whoever watches it: a container's health check.

A port that is open says little: the p2p daemon holds it, whatever has become of the peer. The file
is written on the peer's event loop, so it grows old where that stands still. Its time is that of
the steady clock, which all processes of a machine share and nobody sets.
"""

import asyncio
import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from dht.process.json_file import value_or_none
from dht.process.whole_file import write_whole

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthConfig:
    """How often a peer writes how it is, and when that is too old; times in seconds."""

    write_s: float = 5.0
    stale_s: float = 30.0
    """Age above which the peer that wrote the file stands still, or is gone: six writes are
    missing."""
    file_bytes_max: int = 4096


HEALTH = HealthConfig()


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """What one peer said of itself, and when by the machine's steady clock."""

    steady_s: float
    trouble: str = ""
    """What is wrong; empty where it is well, or is still starting."""


def health_file(identity: Path) -> Path:
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
                await asyncio.sleep(HEALTH.write_s)
        finally:
            if self._mine:
                with suppress(OSError):
                    self.path.unlink()

    def _write(self) -> None:
        if not self._mine and _read(self.path, time.monotonic()) is not None:
            return
        if not self.path.parent.is_dir():  # made with the identity, some seconds after the start
            return
        health = Health(
            steady_s=time.monotonic(), trouble=self.trouble()[: HEALTH.file_bytes_max // 4]
        )
        said = msgspec.json.encode(health) + b"\n"
        try:
            write_whole(self.path, said, lasting=False)
            self._mine = True
        except OSError as error:
            if not (self._mine and _written_over(self.path, said)):
                logger.warning(
                    "%s cannot be written: %s; `anabranch alive` cannot tell that this peer runs",
                    self.path,
                    error.strerror,
                )


def _written_over(path: Path, content: bytes) -> bool:
    """Whether ``content``, JSON text, now stands in the place of what the file held. A full disk
    has no room for a second file, but for this."""
    try:
        with path.open("r+b", buffering=0) as file:
            file.write(content.ljust(os.fstat(file.fileno()).st_size))
    except OSError:
        return False
    return True


def why_unwell(path: Path, now_s: float) -> str:
    """What is wrong with the peer of that file at ``now_s`` by the steady clock; empty where it is
    well."""
    if not path.exists():
        return "no peer runs with that identity"
    health = _read(path, now_s)
    if health is None:
        return f"the peer has said nothing for over {HEALTH.stale_s:.0f} s"
    return health.trouble


def _read(path: Path, now_s: float) -> Health | None:
    """What a peer said within the last ``HEALTH.stale_s``; None where it said nothing."""
    health = value_or_none(path, Health, HEALTH.file_bytes_max)
    fresh = health is not None and 0 <= now_s - health.steady_s <= HEALTH.stale_s
    return health if fresh else None
