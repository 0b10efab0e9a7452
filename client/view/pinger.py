"""Which peers answer: each is pinged all the time, whatever its record says."""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace

from client.view.ping_state import PingState
from dht.errors import NetworkError, PeerError
from dht.messages import codec
from dht.messages.session import Ping, Pong
from dht.supervision import Supervisor, end_all
from dht.transport.interface import PROBE_PROTOCOL, Transport

PINGS_AT_ONCE = 64


PING_EVERY_S = 3.0
PING_AGAIN_S = 0.5
"""Pause after a ping that failed: a dead peer is known as such after one of these."""
PONG_S = 4.0
"""Time for a peer to answer one ping, opening the stream included."""
PING_SHARE_S = 0.02
"""Mean time between two pings of any peers: with more peers, each one's pauses are longer."""
PING_MOST_S = 15.0
"""Longest pause between two pings of one peer, however many there are."""


class Pinger:
    """Pings the watched peers until closed; ``on_change`` is called when one falls silent or
    answers again."""

    def __init__(
        self,
        transport: Transport,
        on_change: Callable[[], None],
        parts: Supervisor | None = None,
    ) -> None:
        self._parts = parts or Supervisor()
        self._transport = transport
        self._on_change = on_change
        self._room = asyncio.Semaphore(PINGS_AT_ONCE)
        self._addresses: dict[str, tuple[str, ...]] = {}
        self._states: dict[str, PingState] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def watch(self, peers: Mapping[str, tuple[str, ...]]) -> None:
        """Watch exactly these peers, by their addresses."""
        self._addresses = dict(peers)
        for peer_id in [p for p in self._tasks if p not in peers]:
            self._tasks.pop(peer_id).cancel()
            self._states.pop(peer_id, None)
        for peer_id in [p for p in peers if p not in self._tasks]:
            self._states[peer_id] = PingState()
            following = self._parts.keep(self._follow, peer_id, ends_process=False)
            self._tasks[peer_id] = asyncio.create_task(following, name="pings")

    def state_of(self, peer_id: str) -> PingState:
        """A peer's last pings; a new :class:`PingState` for one that is not watched."""
        return self._states.get(peer_id, PingState())

    async def close(self) -> None:
        """Stop all pings."""
        tasks = list(self._tasks.values())
        self._tasks.clear()
        await end_all(tasks)

    async def _follow(self, peer_id: str) -> None:
        while True:
            async with self._room:
                rtt_s = await self._ping(peer_id)
            before = self._states[peer_id]
            if rtt_s is None:
                now = replace(before, misses=before.misses + 1)
            else:
                now = PingState(answered_unix_s=self._transport.now(), rtt_s=rtt_s)
            self._states[peer_id] = now
            first = before.answered_unix_s is None and now.answered_unix_s is not None
            if first or now.silent != before.silent:
                self._on_change()
            shared_s = min(PING_SHARE_S * len(self._tasks), PING_MOST_S)
            pause_s = max(PING_EVERY_S, shared_s)
            doubtful = now.misses > 0 and not now.silent
            await asyncio.sleep(PING_AGAIN_S if doubtful else pause_s)

    async def _ping(self, peer_id: str) -> float | None:
        addresses = self._addresses.get(peer_id, ())
        return await round_trip_s(self._transport, peer_id, addresses, PONG_S)


async def round_trip_s(
    transport: Transport, peer_id: str, addresses: tuple[str, ...], limit_s: float
) -> float | None:
    """One ping's time in seconds; None without a right answer within ``limit_s``."""
    loop = asyncio.get_running_loop()
    with suppress(NetworkError, PeerError, TimeoutError):
        async with asyncio.timeout(limit_s):
            stream = await transport.open_stream(peer_id, PROBE_PROTOCOL, addresses=addresses)
            try:
                started_s = loop.time()
                await codec.send_frame(stream, Ping(nonce=1))
                reply = (await codec.read_frame(stream, limit_bytes=1 << 10)).message
                if reply == Pong(nonce=1):
                    return loop.time() - started_s
            finally:
                await stream.close()
    return None


async def answering(
    transport: Transport, peers: Mapping[str, tuple[str, ...]], limit_s: float, grace_s: float
) -> set[str]:
    """Those of ``peers``, by their addresses, that answer a ping within ``limit_s``.

    Once some answered, the others have ``grace_s`` more.
    """
    loop, found = asyncio.get_running_loop(), set[str]()
    until_s = loop.time() + limit_s

    async def ask(peer_id: str, addresses: tuple[str, ...]) -> None:
        if await round_trip_s(transport, peer_id, addresses, limit_s) is not None:
            if not found:
                limit.reschedule(min(until_s, loop.time() + grace_s))
            found.add(peer_id)

    with suppress(TimeoutError):
        async with asyncio.timeout_at(until_s) as limit:
            await asyncio.gather(*(ask(*each) for each in peers.items()))
    return found
