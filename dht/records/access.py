"""How a process reads and writes records: as a client of full peers, or as a full peer.

A full peer is a node of the DHT: it stores its records there, and finds others' there when it
enters and now and then. From then on it asks another full peer every 2 s what is new, and tells
some of them of its own new records at once: a search of the DHT costs twenty requests, this costs
one, and what a peer has to do hardly grows with the swarm. Clients and light peers are no nodes:
they ask full peers.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Mapping
from random import Random
from typing import Protocol

from dht.errors import NetworkError
from dht.messages.peer import SignedRecord
from dht.records.client import OpenStream, RecordClient
from dht.records.directory import RecordKind
from dht.records.replica import Replica, ReplicaConfig
from dht.records.signed import RecordGuard, RecordSigner, kind_of

ASKED_FRESH_S = 0.5
"""What a client or light peer read just now it does not ask for again."""
SHARED_FRESH_S = 10.0
"""A full peer that was told what is new less long ago reads what it knows, and tells others."""
PARTNERS_MAX = 16
"""Full peers that one asks in turn, drawn at random from all."""
ASK_PERIOD_S = 2.0
"""Between two questions of a full peer what is new."""
PUSHED_TO = 12
"""Full peers that are told at once of a new record; the rest ask somebody who knows it within a few
periods: of a swarm of 24 half know it at once, and each period squares the share that does not."""
SEARCH_PERIOD_S = 60.0
"""Between searches of the DHT for others' node records, which join a swarm that was in two parts;
up to half as long again, so that not all search at once."""
STORED_SHARE = 0.5
"""The DHT gets a new record once this share of the life of the one there is over."""
STORING_LIMIT_S = 1.0
"""How long leaving waits for records on their way to the DHT."""
_log = logging.getLogger(__name__)


class RecordAccess(Protocol):
    """Records by key and author, whichever way they are had."""

    async def store(self, key: str, value: bytes, expires_unix_s: float) -> bool:
        """Sign ``value`` and give it to others; whether any took it."""
        ...

    async def get(self, key: str, *, latest: bool) -> Mapping[str, bytes]:
        """The newest payloads by author; ``latest`` asks others in any case.

        Raises NetworkError where nobody could be asked.
        """
        ...

    async def greet(self) -> None:
        """Return when one of the peers that were given answers. Raises NetworkError."""
        ...

    async def close(self) -> None:
        """End what runs, and the streams to others."""
        ...


class AskedRecords:
    """The access of clients and light peers: two full peers are asked for everything."""

    def __init__(
        self,
        open_stream: OpenStream,
        signer: RecordSigner,
        guard: RecordGuard,
        given: Mapping[str, tuple[str, ...]],
        rng: Random,
        now: Callable[[], float],
    ) -> None:
        """``given`` are the peers that the owner named, with their addresses; ``now`` is
        the network's time in Unix seconds."""
        self._signer = signer
        self._asked = RecordClient(open_stream, now, given, rng, guard=guard)
        config = ReplicaConfig(fresh_s=ASKED_FRESH_S)
        self._replica = Replica(guard, now, self._asked.read, config)

    async def store(self, key: str, value: bytes, expires_unix_s: float) -> bool:
        data, _ = self._signer.sign(key, value, expires_unix_s)
        return await self._asked.store(data)

    async def get(self, key: str, *, latest: bool) -> Mapping[str, bytes]:
        if latest:
            await self._asked.read((key,))
        return await self._replica.read(key)

    async def greet(self) -> None:
        await self._asked.greet()

    async def close(self) -> None:
        await self._asked.close()


class RecordDht(Protocol):
    """What a full peer does in the DHT. What is found goes into the guard it was made with."""

    async def search(self, key: str) -> None:
        """Read ``key``. Raises NetworkError."""
        ...

    async def put(self, record: SignedRecord, data: bytes) -> bool:
        """Store a signed record with its author's replicas; whether any took it.

        Raises NetworkError.
        """
        ...


class SharedRecords:
    """The access of full peers: a node of the DHT that others tell what is new."""

    def __init__(
        self,
        open_stream: OpenStream,
        signer: RecordSigner,
        guard: RecordGuard,
        given: Mapping[str, tuple[str, ...]],
        rng: Random,
        now: Callable[[], float],
        *,
        dht: RecordDht,
        me: str,
    ) -> None:
        """``given`` are the peers that the owner named, with their addresses; ``me`` this one."""
        self._signer = signer
        self._guard = guard
        self._rng = rng
        self._dht = dht
        self._me = me
        self.now = now
        given = {peer: where for peer, where in given.items() if peer != me}
        self._asked = RecordClient(
            open_stream, now, given, rng, me=me, guard=guard, helpers_max=PARTNERS_MAX
        )
        config = ReplicaConfig(fresh_s=SHARED_FRESH_S, every_s=ASK_PERIOD_S)
        self._replica = Replica(guard, now, self._exchange, config)
        self._in_dht: dict[str, tuple[float, float]] = {}
        """When this peer's record under each key was stored in the DHT, and when it expires."""
        self._storing: set[asyncio.Task[bool]] = set()

    async def run(self) -> None:
        """Learn what is new until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._replica.run())
            group.create_task(self._keep_searching())

    async def store(self, key: str, value: bytes, expires_unix_s: float) -> bool:
        data, _ = self._signer.sign(key, value, expires_unix_s)
        record = self.keep_signed(data, self._me)
        # Many records differ from the one before in their expiry alone, and a store in the DHT
        # costs a dozen requests: others are told of each, the DHT gets it when it must.
        since_s, until_s = self._in_dht.get(key, (-math.inf, -math.inf))
        storing: asyncio.Task[bool] | None = None
        if not self.now() < since_s + STORED_SHARE * (until_s - since_s):
            storing = asyncio.create_task(self._put_own(record, data))
            self._storing.add(storing)
            storing.add_done_callback(self._storing.discard)
        if await self._asked.push(data, PUSHED_TO):
            return True
        # Shielded: whoever waits no longer must not end what others need.
        return await (self._put_own(record, data) if storing is None else asyncio.shield(storing))

    async def get(self, key: str, *, latest: bool) -> Mapping[str, bytes]:
        if latest:
            await asyncio.gather(self._dht.search(key), self._exchange((key,)))
        return await self._replica.read(key)

    async def greet(self) -> None:
        await self._asked.greet()

    async def close(self) -> None:
        if self._storing:
            await asyncio.wait(self._storing, timeout=STORING_LIMIT_S)
        for task in self._storing:
            task.cancel()
        await self._asked.close()

    async def _put_own(self, record: SignedRecord, data: bytes) -> bool:
        now_s = self.now()
        try:
            stored = await self._dht.put(record, data)
        except (NetworkError, TimeoutError) as error:
            _log.debug("cannot store a record under %s: %s", record.key, error)
            return False
        if stored:
            self._in_dht[record.key] = (now_s, record.expires_unix_s)
        return stored

    async def _exchange(self, keys: tuple[str, ...]) -> None:
        """Learn what another full peer knows that this one does not; with nobody, search."""
        try:
            await self._asked.read_drawn(keys)
        except NetworkError as error:
            _log.debug("no other peer tells what is new: %s", error)
            await asyncio.gather(*(self._dht.search(key) for key in keys))

    async def _keep_searching(self) -> None:
        """Look in the DHT for peers that nobody told of."""
        while True:
            await asyncio.sleep(SEARCH_PERIOD_S * self._rng.uniform(1.0, 1.5))
            for key in self._replica.followed():
                if kind_of(key) is RecordKind.NODES:
                    try:
                        await self._dht.search(key)
                    except (NetworkError, TimeoutError) as error:
                        _log.debug("cannot search the DHT: %s", error)

    # What it tells and does for others (dht.records.helper)

    def fresh(self, key: str) -> bool:
        """Whether this peer follows ``key``, so that a search would find nothing more."""
        return self._replica.fresh(key)

    def known_signed(self, key: str) -> Mapping[str, SignedRecord]:
        """The newest living records under ``key`` that are known here, by author."""
        return self._replica.living(key)

    def keep_signed(self, data: bytes, sender: str) -> SignedRecord:
        """Know a record that its author sent. Raises RecordError where it breaks a rule."""
        return self._guard.admit(data, author=sender, now_unix_s=self.now(), storer=sender)

    async def find_signed(self, key: str) -> None:
        """Search the DHT for ``key``, so that :meth:`known_signed` has what is there."""
        await self._dht.search(key)

    async def store_signed(self, record: SignedRecord, data: bytes) -> bool:
        """Store a record of another peer, which brought it; whether any replica took it."""
        return await self._dht.put(record, data)
