"""Tells a peer's owner that the software was changed while the peer runs."""

import asyncio

from dht.process.installed import Installed
from node.owner.reporter import Reporter

LOOK_S = 60.0
"""Interval between looks at some hundred files, which take a millisecond."""
CHANGED = (
    "The software was changed on the disk while this peer runs the old one. Start it again: parts"
    " that are loaded later may not fit."
)


async def keep_looking(reporter: Reporter) -> None:
    """Look until the software has changed, and say so."""
    installed = Installed()
    while True:
        await asyncio.sleep(LOOK_S)
        if await asyncio.to_thread(installed.changed):
            reporter.event("outdated")
            reporter.say(CHANGED)
            return
