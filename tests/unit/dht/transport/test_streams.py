"""Incoming streams: strangers that open and say nothing leave room for others."""

import asyncio

import pytest

from dht.transport import streams
from dht.transport.interface import Stream
from dht.transport.streams import StreamHandlers, stream_pair


async def idle(stream: Stream) -> None:
    """A handler that waits for a word."""
    await stream.read_exactly(1)


def test_strangers_with_idle_streams_leave_room_for_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(streams, "STREAMS_PER_PEER_MAX", 20)
    monkeypatch.setattr(streams, "STREAMS_MAX", 80)

    async def scenario() -> None:
        handlers = StreamHandlers()
        kept = []

        async def open_from(peer_id: str, count: int) -> int:
            """How many of ``count`` streams from ``peer_id`` are served."""
            before = handlers.errors["TooManyStreams"]
            for _ in range(count):
                near, far = stream_pair(peer_id, "me")
                kept.append(near)
                handlers.start(idle, far)
            await asyncio.sleep(0)
            return count - (handlers.errors["TooManyStreams"] - before)

        assert await open_from("stranger 0", 500) == 20, "one peer has its share and no more"
        for number in range(1, 4):
            assert await open_from(f"stranger {number}", 500) == 20
        assert await open_from("stranger 4", 500) == streams.STREAMS_WHEN_FULL
        assert await open_from("newcomer", 4) == 4, "it is full, and others still come in"
        assert await open_from("stranger 0", 1) == 0
        for near in kept[:500]:
            await near.close()
        for _ in range(20):  # turns of the loop in which the closed streams end
            await asyncio.sleep(0)
        assert await open_from("stranger 0", 1) == 1
        await handlers.close()

    asyncio.run(scenario())
