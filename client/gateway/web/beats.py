"""Signs of life while the events of an answer do not come."""

import asyncio
from collections.abc import AsyncGenerator

from dht.process.json_file import Json
from dht.process.supervision import end_all


async def with_beats(
    events: AsyncGenerator[Json, None], silent_s: float
) -> AsyncGenerator[Json | None, None]:
    """The events as they come, and None whenever nothing came for ``silent_s``."""
    coming: asyncio.Task[Json] | None = None
    try:
        while True:
            coming = coming or asyncio.create_task(_next(events))
            done, _ = await asyncio.wait({coming}, timeout=silent_s)
            if not done:
                yield None
                continue
            try:
                event = coming.result()
            except StopAsyncIteration:
                return
            coming = None
            yield event
    finally:
        if coming is not None:
            await end_all((coming,))
        await events.aclose()


async def _next(events: AsyncGenerator[Json, None]) -> Json:
    return await anext(events)
