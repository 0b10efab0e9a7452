"""Pings peers to learn which answer, whatever their records say."""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

from dht.errors import NetworkError, PeerError
from dht.messages.peer import PEER_BOUNDS
from dht.process.supervision import Supervisor, end_all
from dht.transport.interface import PLAN_PROTOCOL, PROBE_PROTOCOL, Stream, Transport
from dht.transport.requests import round_trip_s


@dataclass(frozen=True, slots=True, kw_only=True)
class PingConfig:
    """Whom pings ask, and when. A killed peer is silent after ``every_s``, and an ``again_s`` for
    each of its further misses."""

    protocol: str
    every_s: float
    keeps_stream: bool
    """Whether each peer's stream stays open: opening one costs several times as much as a ping,
    but peers have room for a few thousand streams in all."""
    answer_s: float = 3.0
    """Time for a peer to answer one ping, opening the stream included."""
    again_s: float = 0.5
    """Pause after a ping that failed, until the peer counts as silent."""
    silent_misses: int = 3
    """Pings in a row without an answer after which a peer is silent."""
    at_once: int = 64
    """Maximum pings under way."""
    share_s: float = 0.02
    """Mean time between two pings of any peers: with more peers, each one's pauses are longer."""
    most_s: float = 15.0
    """Longest pause between two pings of one peer, however many there are."""


BY_PEERS = PingConfig(protocol=PLAN_PROTOCOL, every_s=1.5, keeps_stream=True)
"""Peers watch the few that may plan, and notice soon when one is lost."""
BY_CLIENTS = PingConfig(protocol=PROBE_PROTOCOL, every_s=3.0, keeps_stream=False)
"""Clients, of which there may be thousands, watch all that serve."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PingState:
    """What a peer's last pings said. Time in Unix seconds."""

    answered_unix_s: float | None = None
    rtt_s: float | None = None
    misses: int = 0
    """Pings in a row without an answer."""
    silent: bool = False


class Pinger:
    """Pings the watched peers until closed; ``on_change`` is called when one falls silent or
    answers again."""

    def __init__(
        self,
        transport: Transport,
        config: PingConfig,
        on_change: Callable[[], None] = lambda: None,
        parts: Supervisor | None = None,
    ) -> None:
        self._parts = parts or Supervisor()
        self._transport = transport
        self._config = config
        self._on_change = on_change
        self._room = asyncio.Semaphore(config.at_once)
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
        """Stop all pings; :meth:`watch` starts them again."""
        tasks = list(self._tasks.values())
        self._tasks.clear()
        self._states.clear()
        await end_all(tasks)

    async def _follow(self, peer_id: str) -> None:
        config, line = self._config, _Line(self._transport, peer_id, self._config)
        try:
            while True:
                async with self._room:
                    addresses = self._addresses.get(peer_id, ())
                    rtt_s = await line.round_trip_s(addresses, config.answer_s)
                before = self._states[peer_id]
                if rtt_s is None:
                    misses = before.misses + 1
                    silent = misses >= config.silent_misses
                    now = replace(before, misses=misses, silent=silent)
                else:
                    now = PingState(answered_unix_s=self._transport.now(), rtt_s=rtt_s)
                self._states[peer_id] = now
                first = before.answered_unix_s is None and now.answered_unix_s is not None
                if first or now.silent != before.silent:
                    self._on_change()
                shared_s = min(config.share_s * len(self._tasks), config.most_s)
                doubtful = now.misses > 0 and not now.silent
                await asyncio.sleep(config.again_s if doubtful else max(config.every_s, shared_s))
        finally:
            await line.close()


class _Line:
    """A stream to one peer, opened for each ping or kept."""

    def __init__(self, transport: Transport, peer_id: str, config: PingConfig) -> None:
        self._peer_id = peer_id
        self._transport = transport
        self._config = config
        self._stream: Stream | None = None
        self._requests = 0

    async def round_trip_s(self, addresses: tuple[str, ...], limit_s: float) -> float | None:
        """One ping's time in seconds; None without a right answer within ``limit_s``."""
        answered = False
        try:
            with suppress(NetworkError, PeerError, TimeoutError):
                async with asyncio.timeout(limit_s):
                    took_s = await self._ping(addresses)
                    answered = True
                    return took_s
            return None
        finally:
            if not (answered and self._config.keeps_stream):
                await self.close()

    async def _ping(self, addresses: tuple[str, ...]) -> float:
        if self._requests >= PEER_BOUNDS.requests_max:
            await self.close()
        if self._stream is not None:
            try:
                return await self._ask(self._stream)
            except NetworkError:  # the peer closed it meanwhile
                await self.close()
        self._stream = await self._transport.open_stream(
            self._peer_id, self._config.protocol, addresses=addresses
        )
        return await self._ask(self._stream)

    async def _ask(self, stream: Stream) -> float:
        self._requests += 1
        return await round_trip_s(stream)

    async def close(self) -> None:
        """Close the stream if there is one."""
        stream, self._stream, self._requests = self._stream, None, 0
        if stream is not None:
            await stream.close()


async def answers_ping(
    transport: Transport,
    config: PingConfig,
    peer_id: str,
    addresses: tuple[str, ...],
    limit_s: float | None = None,
) -> bool:
    """Whether ``peer_id`` answers one ping within ``limit_s``; None: the usual time."""
    line = _Line(transport, peer_id, replace(config, keeps_stream=False))
    return await line.round_trip_s(addresses, limit_s or config.answer_s) is not None


async def answering(
    transport: Transport,
    config: PingConfig,
    peers: Mapping[str, tuple[str, ...]],
    limit_s: float,
    grace_s: float,
) -> set[str]:
    """Those of ``peers``, by their addresses, that answer a ping within ``limit_s``.

    Once some answered, the others have ``grace_s`` more.
    """
    loop, found = asyncio.get_running_loop(), set[str]()
    until_s = loop.time() + limit_s

    async def ask(peer_id: str, addresses: tuple[str, ...]) -> None:
        if await answers_ping(transport, config, peer_id, addresses, limit_s):
            if not found:
                limit.reschedule(min(until_s, loop.time() + grace_s))
            found.add(peer_id)

    with suppress(TimeoutError):
        async with asyncio.timeout_at(until_s) as limit:
            await asyncio.gather(*(ask(*each) for each in peers.items()))
    return found
