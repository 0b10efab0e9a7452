"""Reads and writes records: as a client of full peers, or as a full peer.

A full peer is a node of the DHT: it stores its records there, and searches it for others' records
when it joins and then now and then. In between, it asks another full peer for news every 2 s, and
pushes its own new records to some full peers at once. A search of the DHT costs twenty requests, a
question for news costs one, and a peer's work hardly grows with the swarm. Clients and light peers
are not nodes of the DHT: they ask full peers.
"""

import asyncio
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Protocol

from dht.budget import Parties
from dht.errors import NetworkError
from dht.messages.peer import SignedRecord
from dht.process.supervision import Supervisor, loop_s, slept_s
from dht.records.client import OpenStream, RecordClient
from dht.records.directory import RecordKind
from dht.records.network_clock import NetworkClock
from dht.records.replica import Replica, ReplicaConfig
from dht.records.signed import RecordGuard, RecordSigner, kind_of
from dht.transport.interface import Contact
from dht.transport.other_versions import OtherVersions
from dht.transport.streams import StreamHandlers

_log = logging.getLogger(__name__)


class RecordAccess(ABC):
    """Access to records by key and author."""

    asked: RecordClient

    @abstractmethod
    async def store(self, key: str, value: bytes, expires_unix_s: float) -> bool:
        """Sign ``value`` and give it to other peers; returns whether any took it."""

    @abstractmethod
    async def get(self, key: str, *, latest: bool) -> Mapping[str, bytes]:
        """The newest payloads under ``key`` by author; with ``latest``, others are always asked.

        Raises NetworkError where no peer could be asked.
        """

    async def greet(self) -> None:
        """Wait until one of the given peers answers. Raises NetworkError."""
        await self.asked.greet()

    @property
    def speak_otherwise(self) -> bool:
        """Whether some of the given peers speak another version of the wire, as far as asked."""
        return bool(self.asked.speak_otherwise)

    def contact(self, handlers: StreamHandlers) -> Contact:
        """When others last showed that they know this peer; ``handlers`` take their calls."""
        asked = self.asked
        return Contact(
            returned_s=asked.returned_s,
            answered_s=asked.answered_s,
            called_s=handlers.called_s,
            known_s=max(asked.known_s, handlers.known_called_s),
            others=asked.others,
        )

    async def close(self) -> None:
        """End all tasks and streams."""
        await self.asked.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessConfig:
    """How often full peers are asked for records."""

    asked_fresh_s: float = 0.5
    """Time for which a client or light peer uses records that it read without asking again."""
    shared_fresh_s: float = 10.0
    """Time for which a full peer that got the news answers reads, its own and others', from its
    replica."""
    partners_max: int = 16
    """Maximum full peers, drawn at random from all, that one full peer asks in turn."""
    ask_period_s: float = 2.0
    """Period at which a full peer asks another for news."""
    pushed_to: int = 12
    """Number of full peers to which a new record is pushed at once. The others learn it within a
    few periods: in a swarm of 24 half know it at once, and each period squares the share that does
    not."""
    search_period_s: float = 60.0
    """Period of searches of the DHT for node records, which rejoin a swarm that was in two parts.
    It is up to 1.5 times as long, so that not all peers search at once."""
    stored_share: float = 0.5
    """Share of the lifetime of this peer's record in the DHT after which a new one is stored
    there."""
    storing_limit_s: float = 1.0
    """Maximum time that leaving waits for records on their way to the DHT."""


class AskedRecords(RecordAccess):
    """The access of clients and light peers: each read and write asks two full peers."""

    def __init__(
        self,
        open_stream: OpenStream,
        signer: RecordSigner,
        guard: RecordGuard,
        given: Mapping[str, tuple[str, ...]],
        rng: Random,
        now: Callable[[], float],
        versions: OtherVersions | None = None,
        parties: Parties | None = None,
    ) -> None:
        """``given`` are the peers that the owner named, with their addresses; ``now`` is
        this machine's clock in Unix seconds, which their answers correct; ``parties`` are those
        of :class:`RecordClient`."""
        self._signer = signer
        self._guard = guard
        # What helpers said would else be taken for the time at which this machine fell asleep.
        self.clock = NetworkClock(now, lambda: loop_s() + slept_s())
        """The network's time."""
        self.asked = RecordClient(
            open_stream,
            self.clock.now,
            given,
            rng,
            me=signer.peer_id,
            guard=guard,
            versions=versions,
            on_time=self.clock.heard,
            parties=parties,
        )
        config = ReplicaConfig(fresh_s=AccessConfig().asked_fresh_s)
        self._replica = Replica(guard, self.clock.now, self.asked.read, config)

    async def store(self, key: str, value: bytes, expires_unix_s: float) -> bool:
        above = self._guard.sequence_of(key, self._signer.peer_id)
        return await self.asked.store(self._signer.sign(key, value, expires_unix_s, above))

    async def get(self, key: str, *, latest: bool) -> Mapping[str, bytes]:
        if latest:
            await self.asked.read((key,))
        return await self._replica.read(key)


class RecordDht(Protocol):
    """A full peer's operations in the DHT."""

    async def search(self, key: str) -> None:
        """Read ``key``; found records go into the guard. Raises NetworkError."""
        ...

    async def put(self, record: SignedRecord, data: bytes) -> bool:
        """Store a signed record at the DHT's replicas; returns whether any took it.

        Raises NetworkError.
        """
        ...


class SharedRecords(RecordAccess):
    """The access of full peers: a node of the DHT that exchanges news with other full peers."""

    def __init__(
        self,
        open_stream: OpenStream,
        signer: RecordSigner,
        guard: RecordGuard,
        given: Mapping[str, tuple[str, ...]],
        rng: Random,
        now: Callable[[], float],
        versions: OtherVersions | None = None,
        parties: Parties | None = None,
        *,
        dht: RecordDht,
        config: AccessConfig | None = None,
    ) -> None:
        """``given`` are the peers that the owner named, with their addresses; ``now`` is the
        network's time in Unix seconds."""
        self._config = config or AccessConfig()
        self._signer = signer
        self._guard = guard
        self._rng = rng
        self._dht = dht
        self._me = me = signer.peer_id
        self.now = now
        given = {peer: where for peer, where in given.items() if peer != me}
        self.asked = RecordClient(
            open_stream,
            now,
            given,
            rng,
            me=me,
            guard=guard,
            helpers_max=self._config.partners_max,
            versions=versions,
            parties=parties,
        )
        every_s, fresh_s = self._config.ask_period_s, self._config.shared_fresh_s
        replicating = ReplicaConfig(fresh_s=fresh_s, every_s=every_s)
        self._replica = Replica(guard, now, self._exchange, replicating)
        guard.me, guard.follows = me, self._replica.follows
        self._in_dht: dict[str, float] = {}
        """When this peer's record under each key is to be stored in the DHT again, by the loop's
        clock, which nobody sets."""
        self._storing: set[asyncio.Task[bool]] = set()

    async def run(self, parts: Supervisor | None = None) -> None:
        """Ask for news and search the DHT until cancelled; raises what ``parts`` raises."""
        parts = parts or Supervisor()
        await parts.run(self._replica.run, self._keep_searching, ends_process=False)

    async def store(self, key: str, value: bytes, expires_unix_s: float) -> bool:
        above = self._guard.sequence_of(key, self._me)
        data = self._signer.sign(key, value, expires_unix_s, above)
        record = self.keep_signed(data, self._me)
        # Many records differ from the one before only in their expiry, and a store in the DHT costs
        # a dozen requests: each record is pushed to others, but stored in the DHT only when needed.
        storing: asyncio.Task[bool] | None = None
        if loop_s() >= self._in_dht.get(key, -math.inf):
            storing = asyncio.create_task(self._put_own(record, data))
            self._storing.add(storing)
            storing.add_done_callback(self._storing.discard)
        if await self.asked.push(data, self._config.pushed_to):
            return True
        # Shielded: a caller that stops waiting must not end the store.
        return await (self._put_own(record, data) if storing is None else asyncio.shield(storing))

    async def get(self, key: str, *, latest: bool) -> Mapping[str, bytes]:
        if latest:
            await asyncio.gather(self._dht.search(key), self._exchange((key,)))
        return await self._replica.read(key)

    async def close(self) -> None:
        if self._storing:
            await asyncio.wait(self._storing, timeout=self._config.storing_limit_s)
        for task in self._storing:
            task.cancel()
        await super().close()

    async def _put_own(self, record: SignedRecord, data: bytes) -> bool:
        now_s, lives_s = loop_s(), record.expires_unix_s - self.now()
        try:
            stored = await self._dht.put(record, data)
        except (NetworkError, TimeoutError) as error:
            _log.debug("cannot store a record under %s: %s", record.key, error)
            return False
        if stored:
            self._in_dht[record.key] = now_s + self._config.stored_share * lives_s
        return stored

    async def _exchange(self, keys: tuple[str, ...]) -> None:
        """Ask another full peer for news; search the DHT where none answers."""
        try:
            await self.asked.read_drawn(keys)
        except NetworkError as error:
            _log.debug("no other peer tells what is new: %s", error)
            await asyncio.gather(*(self._dht.search(key) for key in keys))

    async def _keep_searching(self) -> None:
        """Search the DHT now and then for peers that no other peer told of."""
        while True:
            await asyncio.sleep(self._config.search_period_s * self._rng.uniform(1.0, 1.5))
            await self._search(
                key for key in self._replica.followed() if kind_of(key) is RecordKind.NODES
            )

    async def _search(self, keys: Iterable[str]) -> None:
        for key in keys:
            try:
                await self._dht.search(key)
            except (NetworkError, TimeoutError) as error:
                _log.debug("cannot search the DHT: %s", error)

    async def search_nodes(self) -> None:
        """Search the DHT for the nodes of the followed models at once: others were met again."""
        await self._search(self.asked.node_keys)

    # For other peers (dht.records.helper)

    def fresh(self, key: str) -> bool:
        """Whether ``key`` is up to date here, so that a search would find nothing more."""
        return self._replica.fresh(key)

    def known_signed(self, key: str) -> Mapping[str, SignedRecord]:
        """The newest living records under ``key`` in the replica, by author."""
        return self._replica.living(key)

    def keep_signed(self, data: bytes, sender: str) -> SignedRecord:
        """Keep a record that its author sent. Raises RecordError where it breaks a rule."""
        return self._guard.admit(data, author=sender, now_unix_s=self.now(), storer=sender)

    async def find_signed(self, key: str) -> None:
        """Search the DHT for ``key``; :meth:`known_signed` then has the records found."""
        await self._dht.search(key)

    async def store_signed(self, record: SignedRecord, data: bytes) -> bool:
        """Store a record that its author brought; returns whether any replica took it."""
        return await self._dht.put(record, data)
