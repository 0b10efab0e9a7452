"""Incoming streams: strangers that open and say nothing leave room for others."""

import asyncio
from dataclasses import replace

from dht.budget import STREAMS, Budget
from dht.transport.interface import Stream
from dht.transport.streams import StreamHandlers, stream_pair


async def idle(stream: Stream) -> None:
    """A handler that waits for a word."""
    await stream.read_exactly(1)


async def test_strangers_with_idle_streams_leave_room_for_others() -> None:
    budget = Budget(replace(STREAMS, per_peer=20, in_all=160, crowded=80))
    handlers = StreamHandlers(budget)
    kept = []

    async def open_from(peer_id: str, count: int) -> int:
        """How many of ``count`` streams from ``peer_id`` are served."""
        before = budget.held(STREAMS).refused
        for _ in range(count):
            near, far = stream_pair(peer_id, "me")
            kept.append(near)
            handlers.start(idle, far)
        await asyncio.sleep(0)
        return count - (budget.held(STREAMS).refused - before)

    assert await open_from("stranger 0", 500) == 20, "one peer has its share and no more"
    for number in range(1, 4):
        assert await open_from(f"stranger {number}", 500) == 20
    assert await open_from("stranger 4", 500) == STREAMS.when_crowded
    assert await open_from("newcomer", 4) == 4, "it is full, and others still come in"
    assert await open_from("stranger 0", 1) == 0
    for near in kept[:500]:
        await near.close()
    for _ in range(20):  # turns of the loop in which the closed streams end
        await asyncio.sleep(0)
    assert await open_from("stranger 0", 1) == 1
    await handlers.close()
