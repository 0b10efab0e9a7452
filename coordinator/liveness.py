"""Which peers answer: pings on the plan protocol, independent of what their records still say."""

import asyncio
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from dht import wire
from dht.errors import NetworkError, PeerError
from dht.messages import Ping, Pong
from dht.transport import PLAN_PROTOCOL, Transport


@dataclass(frozen=True, slots=True, kw_only=True)
class LivenessConfig:
    """Times in seconds."""

    every_s: float = 1.5
    answer_s: float = 3.0
    failures: int = 3
    """So many pings in a row without an answer make a peer silent."""


class Liveness:
    """Pings the watched peers. A silent one counts as such until it answers again."""

    def __init__(self, transport: Transport, config: LivenessConfig) -> None:
        self._transport = transport
        self._config = config
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._addresses: dict[str, tuple[str, ...]] = {}
        self._failures: dict[str, int] = {}

    @property
    def silent(self) -> frozenset[str]:
        """Peers that did not answer lately. They stay watched until they do."""
        limit = self._config.failures
        return frozenset(peer for peer, count in self._failures.items() if count >= limit)

    def watch(self, peers: Mapping[str, tuple[str, ...]], known: Collection[str]) -> None:
        """Watch exactly these peers (by their addresses), and the silent ones among ``known``."""
        self._addresses.update(peers)
        keep = set(peers) | (self.silent & set(known))
        for peer_id in set(self._tasks) - keep:
            self._tasks.pop(peer_id).cancel()
            self._failures.pop(peer_id, None)
            self._addresses.pop(peer_id, None)
        for peer_id in peers:
            if peer_id not in self._tasks:
                self._tasks[peer_id] = asyncio.create_task(self._ping(peer_id))

    async def close(self) -> None:
        """Stop all pings."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _ping(self, peer_id: str) -> None:
        while True:
            try:
                async with asyncio.timeout(self._config.answer_s):
                    await self._ask(peer_id)
                self._failures[peer_id] = 0
            except (NetworkError, PeerError, TimeoutError):
                self._failures[peer_id] = self._failures.get(peer_id, 0) + 1
            await asyncio.sleep(self._config.every_s)

    async def _ask(self, peer_id: str) -> None:
        stream = await self._transport.open_stream(
            peer_id, PLAN_PROTOCOL, addresses=self._addresses.get(peer_id, ())
        )
        try:
            await wire.send_frame(stream, Ping(nonce=1))
            reply = (await wire.read_frame(stream, limit_bytes=1 << 10)).message
            if not isinstance(reply, Pong):
                raise wire.MalformedError("a ping was answered with something else")
        finally:
            await stream.close()
