"""The two ends of a link's stream."""

import asyncio
from typing import Any

from coordinator.policies.links.scheduler import LinkScheduler
from dht.messages import codec
from dht.messages.session import ActivationItem, Activations
from dht.transport.streams import stream_pair
from node.links.framed_stream import LinkReader, LinkSender


def rows(session: str, position: int, tokens: int, hidden: int = 64) -> tuple[Activations, bytes]:
    item = ActivationItem(session=session, attempt=1, position=position, tokens=tokens)
    size = tokens * hidden * 4
    body = (bytes(range(position % 200, 251)) * (size // 51 + 1))[:size]
    return Activations(items=(item,), dtype="float32", hidden=hidden), body


class Ends:
    """A sender and an attentive reader on the two ends of a stream."""

    def __init__(self, scheduler: LinkScheduler) -> None:
        near, far = stream_pair("near", "far")
        self.sender = LinkSender(near, scheduler)
        self.reader = LinkReader(far)
        self.far = far
        self.got: list[codec.Frame] = []
        self.reading = asyncio.Event()
        self.reading.set()

    async def __aenter__(self) -> "Ends":
        self.tasks = [
            asyncio.create_task(self.sender.run()),
            asyncio.create_task(self._read()),
        ]
        return self

    async def _read(self) -> None:
        while True:
            await self.reading.wait()
            frame = await self.reader.read()
            if frame is not None:
                self.got.append(frame)
            if (said := self.reader.acknowledgement()) is not None:
                self.sender.acknowledged(said)

    async def until(self, count: int) -> None:
        async with asyncio.timeout(60):
            while len(self.got) < count:
                done, _ = await asyncio.wait(self.tasks, timeout=0.001)
                for task in done:
                    task.result()

    async def __aexit__(self, *_: object) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


async def frames_arrive_whole(ends: Ends) -> None:
    """Whatever the scheduler: frames of all sizes arrive whole and each session's in order."""
    sent: dict[str, list[tuple[Any, bytes]]] = {}
    for n in range(60):
        session = f"session-{n % 3}"
        tokens = (1, 300, 7, 1, 4000)[n % 5]
        message, body = rows(session, n, tokens)
        sent.setdefault(session, []).append((message, body))
        ends.sender.send(message, body)
    await ends.until(60)
    got: dict[str, list[tuple[Any, bytes]]] = {}
    for frame in ends.got:
        got.setdefault(frame.message.items[0].session, []).append(
            (frame.message, bytes(frame.body))
        )
    assert got == sent
    assert ends.sender.queued_bytes == 0
