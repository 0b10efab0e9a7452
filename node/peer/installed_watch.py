"""Tells a peer's owner that the software was changed while the peer runs."""

import asyncio
from dataclasses import dataclass

from dht.process.installed import Installed
from node.owner.reporter import Reporter


@dataclass(frozen=True, slots=True, kw_only=True)
class InstalledConfig:
    """How often the files are looked at."""

    look_s: float = 60.0
    """A look at some hundred files takes a millisecond."""


INSTALLED = InstalledConfig()
CHANGED = (
    "The software was changed on the disk while this peer runs the old one. Start it again: parts"
    " that are loaded later may not fit."
)


async def keep_looking(reporter: Reporter) -> None:
    """Look until the software has changed, and say so."""
    installed = Installed()
    while True:
        await asyncio.sleep(INSTALLED.look_s)
        if await asyncio.to_thread(installed.changed):
            reporter.event("outdated")
            reporter.say(CHANGED)
            return
