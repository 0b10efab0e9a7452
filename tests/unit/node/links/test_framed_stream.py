"""The shell of a link: frames whole and in order over real streams, credits, hostile parts."""

import asyncio
import functools
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest

from coordinator.policies.links.scheduler import LinkScheduler
from dht.errors import NetworkError
from dht.messages import codec
from dht.messages.session import (
    Delivered,
    FramePart,
    Ping,
    SessionClose,
)
from dht.transport.streams import stream_pair
from node.links import framed_stream
from node.links.framed_stream import LinkReader, LinkSender
from tests.unit.node.links.ends import Ends, frames_arrive_whole, rows


def on_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        asyncio.run(test(*arguments, **named))

    return run


@on_loop
async def test_frames_of_all_sizes_arrive_whole_and_each_session_in_order() -> None:
    async with Ends(LinkScheduler()) as ends:
        await frames_arrive_whole(ends)


@on_loop
async def test_decodes_and_control_overtake_a_prompt_of_another_session() -> None:
    async with Ends(LinkScheduler()) as ends:
        ends.sender.send(*rows("long-prompt", 0, 40_000))
        ends.sender.send(*rows("other-answer", 7, 1))
        ends.sender.send(SessionClose(session="third-one", attempt=1))
        await ends.until(3)
        kinds = [type(frame.message).__name__ for frame in ends.got]
        assert kinds[-1] == "Activations"
        assert ends.got[-1].message.items[0].session == "long-prompt"


@on_loop
async def test_a_decode_row_waits_behind_its_own_sessions_prompt() -> None:
    async with Ends(LinkScheduler()) as ends:
        ends.sender.send(*rows("one-session", 0, 40_000))
        ends.sender.send(*rows("one-session", 40_000, 1))
        await ends.until(2)
        assert [frame.message.items[0].position for frame in ends.got] == [0, 40_000]


@on_loop
async def test_prefill_waits_for_credit_that_the_reader_holds_back() -> None:
    near, far = stream_pair("near", "far")
    sender, reader = LinkSender(near, LinkScheduler()), LinkReader(far)
    run = asyncio.create_task(sender.run())
    sender.send(*rows("long-prompt", 0, 40_000))
    for _ in range(2000):  # read all there is, and give no credit for it
        for _ in range(4):  # the sender goes on writing
            await asyncio.sleep(0)
        if reader.total_bytes >= sender.scheduler.delivery.sent_bytes:
            break
        await reader.read()
        if (said := reader.acknowledgement(hold=True)) is not None:
            assert said.slow_bytes == 0
            sender.acknowledged(said)
    assert sender.queued_bytes > 0
    sender.send(*rows("other-answer", 7, 1))
    frame = await reader.read()
    assert frame is not None
    assert frame.message.items[0].session == "other-answer"
    said = reader.acknowledgement()
    assert said is not None
    before = sender.scheduler.delivery.sent_bytes
    sender.acknowledged(said)
    assert sender.scheduler.delivery.sent_bytes > before
    run.cancel()
    await asyncio.gather(run, return_exceptions=True)


@on_loop
async def test_a_reader_that_gives_no_credit_breaks_the_link_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hasty = replace(framed_stream.SENDING, stalled_s=0.05)
    monkeypatch.setattr(framed_stream, "SENDING", hasty)
    near, _ = stream_pair("near", "far")
    sender = LinkSender(near, LinkScheduler())
    sender.send(*rows("long-prompt", 0, 40_000))
    with pytest.raises(NetworkError, match="no credit for"):
        async with asyncio.timeout(60):
            await sender.run()


@pytest.mark.virtual(limit_s=600)
async def test_a_link_that_is_full_of_decodes_is_no_dead_one() -> None:
    loop = asyncio.get_running_loop()
    near, far = stream_pair("near", "far")
    sender = LinkSender(near, LinkScheduler(), lambda: int(loop.time() * 1e6))
    reader = LinkReader(far)
    running = asyncio.create_task(sender.run())
    for _ in range(400):
        sender.send(*rows("an-answer", 7, 1, hidden=2048))
    began_s = loop.time()
    while loop.time() - began_s < 2 * framed_stream.SENDING.stalled_s:
        await asyncio.sleep(0.1)
        sender.send(*rows("an-answer", 7, 1, hidden=2048))
        assert await reader.read() is not None
        if (said := reader.acknowledgement()) is not None:
            sender.acknowledged(said)
        assert sender.queued_bytes > 0, "there is always more than the link takes"
        assert not running.done(), "all is read, as fast as it may come"
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


@on_loop
async def test_what_may_wait_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(framed_stream, "QUEUED_BYTES_MAX", 1 << 20)
    near, _ = stream_pair("near", "far")
    sender = LinkSender(near, LinkScheduler())
    for n in range(4):
        sender.send(*rows("long-prompt", n * 4000, 4000))
    with pytest.raises(NetworkError, match="bytes queued, nothing is read"):
        async with asyncio.timeout(60):
            await sender.run()


@on_loop
async def test_credit_for_what_was_never_sent_is_malformed() -> None:
    near, _ = stream_pair("near", "far")
    sender = LinkSender(near, LinkScheduler())
    sender.send(Ping(nonce=1))
    with pytest.raises(codec.MalformedError, match="acknowledged"):
        sender.acknowledged(Delivered(total_bytes=1 << 30, slow_bytes=0))
    with pytest.raises(codec.MalformedError, match="credit for 5 bytes"):
        sender.acknowledged(Delivered(total_bytes=0, slow_bytes=5))


def part(number: int, offset: int, total: int, *, slow: bool = True) -> FramePart:
    return FramePart(number=number, offset=offset, total_bytes=total, slow=slow)


WHOLE = codec.encode_frame(Ping(nonce=7), b"x" * 100)
INNER_PART = codec.encode_frame(part(9, 0, 10), b"y" * 10)
HOSTILE: dict[str, list[tuple[FramePart, bytes]]] = {
    "a frame that never began": [(part(1, 5, 10), b"abc")],
    "0 are here": [(part(1, 0, 10), b"")],
    "3 are here": [(part(1, 0, 10), b"abc"), (part(1, 4, 10), b"abc")],
    "9 are here": [(part(1, 0, 10), b"abcdefghi"), (part(1, 9, 10), b"abc")],
    "contradicts": [(part(1, 0, 10), b"abc"), (part(1, 3, 10, slow=False), b"abc")],
    "in parts at once": [(part(n, 0, 10), b"abc") for n in range(9)],
    "a part within a part": [(part(1, 0, len(INNER_PART)), INNER_PART)],
    "frame of": [(part(1, 0, 12), b"\xff" * 12)],
}


@pytest.mark.parametrize("reason", HOSTILE)
@on_loop
async def test_parts_that_cannot_be_are_malformed(reason: str) -> None:
    near, far = stream_pair("near", "far")
    reader = LinkReader(far)
    for message, body in HOSTILE[reason]:
        near.write(codec.encode_frame(message, body))
    for _ in HOSTILE[reason][:-1]:
        assert await reader.read() is None
    with pytest.raises(codec.MalformedError, match=reason):
        await reader.read()


@on_loop
async def test_a_frame_in_parts_is_what_was_sent() -> None:
    near, far = stream_pair("near", "far")
    reader = LinkReader(far)
    for at in range(0, len(WHOLE), 7):
        near.write(codec.encode_frame(part(3, at, len(WHOLE)), WHOLE[at : at + 7]))
    frame = None
    while frame is None:
        frame = await reader.read()
    assert (frame.message, bytes(frame.body)) == (Ping(nonce=7), b"x" * 100)
    assert reader.total_bytes == reader.slow_bytes == len(WHOLE)
