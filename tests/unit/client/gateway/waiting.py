"""Waiting for conditions instead of seconds."""

import asyncio
from collections.abc import Callable


async def until(condition: Callable[[], bool], limit_s: float = 60.0) -> None:
    """Return once ``condition()`` holds."""
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110  conditions of other people's code
            await asyncio.sleep(0.005)
