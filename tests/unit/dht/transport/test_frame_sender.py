"""The sender of a stream's answers: what waits for a slow reader is bounded, no loss is silent."""

import asyncio
from dataclasses import replace

import pytest

from dht.errors import NetworkError
from dht.messages.session import Ping
from dht.transport import frame_sender
from dht.transport.frame_sender import FrameSender
from dht.transport.streams import stream_pair

PIECE = bytes(64 << 10)


@pytest.mark.virtual(limit_s=600)
async def test_a_reader_that_is_too_far_behind_ends_the_stream_although_it_reads_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small = replace(frame_sender.SENDING, queued_bytes_max=16 * len(PIECE))
    monkeypatch.setattr(frame_sender, "SENDING", small)
    near, far = stream_pair("near", "far")
    sender = FrameSender(near)
    running = asyncio.create_task(sender.run())
    for nonce in range(64):
        sender.send(Ping(nonce=nonce), PIECE)
        await asyncio.sleep(0.01)
    assert not running.done(), "it waits for the reader"
    reading = asyncio.create_task(far.read_exactly(512 << 10))
    with pytest.raises(NetworkError, match="bytes queued, nothing is read"):
        async with asyncio.timeout(60):
            await running
    reading.cancel()
