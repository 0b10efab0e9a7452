"""Hops: a lost one is told of at once, whatever its stream still has to do."""

import asyncio
import random
from typing import Any

import pytest

from dht.identity.peer_id import Identity
from dht.messages.session import Ping
from dht.transport.interface import HOP_PROTOCOL, Stream
from node.links.hops import HopConfig, HopTable
from testing.network import MemoryNetwork

CLOSES_S = 1.0
"""Time that the bytes of a stream take which cannot leave."""


class SlowToClose:
    """A transport whose streams close slowly."""

    def __init__(self, inner: Any, done: list[str]) -> None:
        self._inner = inner
        self._done = done

    async def open_stream(self, *given: Any, **named: Any) -> Stream:
        stream = await self._inner.open_stream(*given, **named)
        close = stream.close

        async def slowly() -> None:
            await asyncio.sleep(CLOSES_S)
            await close()
            self._done.append("closed")

        stream.close = slowly
        return stream


class Events:
    """What a table of hops tells."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.in_use = True
        self.told = asyncio.Event()

    def hop_lost(self, peer_id: str, reason: str) -> None:
        self.done.append(reason)
        self.told.set()

    def hop_in_use(self, peer_id: str) -> bool:
        return self.in_use


async def no_addresses(peer_id: str) -> tuple[str, ...]:
    return ()


@pytest.mark.virtual(limit_s=600)
@pytest.mark.parametrize("way", ["silent", "idle"])
async def test_who_uses_a_hop_hears_of_its_end_before_its_stream_is_closed(way: str) -> None:
    network, events = MemoryNetwork(random.Random(1)), Events()
    near, far = network.transport(Identity.generate()), network.transport(Identity.generate())

    async def silent(stream: Stream) -> None:
        await asyncio.Event().wait()

    await far.serve(HOP_PROTOCOL, silent)
    transport: Any = SlowToClose(near, events.done)
    handler: Any = events
    hops = HopTable(transport, no_addresses, HopConfig(idle_s=3.0), handler)
    events.in_use = way == "silent"
    hop = hops.get(far.peer_id)
    hop.send(Ping(nonce=1))
    await events.told.wait()
    assert way in events.done[0]
    assert hops.find(far.peer_id) is None, "who sends now opens another"
    await asyncio.sleep(2 * CLOSES_S)
    assert events.done[1:] == ["closed"]
    await hops.close()
