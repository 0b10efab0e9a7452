"""Incoming streams: strangers that open and say nothing leave room for others."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from dht.budget import STREAMS, Budget
from dht.daemon.control import LibP2PStream
from dht.messages import codec
from dht.messages.session import Ping
from dht.transport.interface import Stream
from dht.transport.streams import PIPES, StreamHandlers, stream_pair


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


FRAMES = 400
FRAME = codec.encode_frame(Ping(nonce=1))


def of_process() -> Stream:
    near, far = stream_pair("a", "b")
    near.write(FRAME * FRAMES)
    return far


def of_daemon() -> Stream:
    reader, writer = asyncio.StreamReader(), Any
    reader.feed_data(FRAME * FRAMES)
    return LibP2PStream("a", reader, writer)  # type: ignore[arg-type]


@pytest.mark.parametrize("full", [of_process, of_daemon])
async def test_others_get_the_loop_between_small_frames_that_have_come(full: Any) -> None:
    """A read of what has come does not wait: all frames of a full buffer were handled in one go,
    and those of hundreds of streams one after the other."""
    stream = full()

    async def read() -> None:
        for _ in range(FRAMES):
            await codec.read_frame(stream)

    reading, turns = asyncio.create_task(read()), 0
    while not reading.done():
        await asyncio.sleep(0)
        turns += 1
    await reading
    assert turns >= 2 * FRAMES // PIPES.reads_a_turn


async def test_small_reads_of_a_large_chunk_copy_no_more_than_they_take() -> None:
    near, far = stream_pair("a", "b")
    data = bytes(range(256)) * 4
    near.write(data)
    near.write(data)
    pipe = far._incoming
    (first, _) = pipe._chunks
    read = b""
    for size in (1, 7, 1000, 16, 1000, 23, 1):
        read += await far.read_exactly(size)
        if len(read) < len(data):
            assert pipe._chunks[0] is first
    assert read == 2 * data
    assert pipe.unread_bytes == 0
