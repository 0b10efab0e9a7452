"""Simulates a network within one process, for tests and the simulator.

It has links with delay, bandwidth and loss, partitions, dead and frozen peers, and a DHT with the
real one's rules for records. Time is the event loop's, so under :mod:`testing.clock`
nothing really waits; randomness comes from the given generator. Streams are reliable: a loss costs
time, as with TCP.
"""

import asyncio
import contextlib
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from coordinator.simulator.core.clock import log_event
from dht.errors import NetworkError
from dht.identity.peer_id import Identity
from dht.messages.peer import SignedRecord
from dht.records.signed import RecordError, RecordGuard, RecordSigner
from dht.transport.interface import OPEN_LIMIT_S, Contact, Stream, StreamHandler
from dht.transport.streams import PIPES, Pipe, PipeStream, StreamHandlers

CLOCK_STARTS_UNIX_S = 1.7e9
RETRY_S = 0.2
"""Delay of a stream by a lost packet, besides its round trip."""
TICK_S = 1e-6
"""Difference below which two times are the same instant."""
VERSIONS_MAX = 16
"""Maximum versions of one author's record that replicas on different sides may hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkModel:
    """The properties of one directed link."""

    delay_s: float = 0.0
    bandwidth_bytes_per_s: float | None = None
    """Bandwidth; None: unlimited."""
    loss: float = 0.0
    """Probability that a stream cannot be opened, or that a write is delayed by a retry."""
    unread_bytes_max: int = PIPES.bytes_max
    """Unread bytes of a stream above which its writer waits: socket buffers and lower queues."""


@dataclass(slots=True)
class _LinkState:
    """State of one directed link, which its streams share first come, first served."""

    free_at_s: float = 0.0
    arrives_s: float = 0.0
    """When the last write under way arrives."""
    queue: deque[tuple[float, Callable[[], None]]] = field(default_factory=deque)
    timer: asyncio.TimerHandle | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Version:
    data: bytes
    record: SignedRecord
    stored_s: float
    side: frozenset[str] | None
    """The peers that can read the version while the network is cut; None: all."""


class MemoryNetwork:
    """All peers of one in-process network, and the links between them."""

    def __init__(
        self,
        rng: random.Random,
        *,
        link: LinkModel | None = None,
        dht_delay_s: float = 0.0,
        dht_loss: float = 0.0,
        dht_stale_s: float = 0.0,
    ) -> None:
        """``link`` is the default of all pairs. A read may miss records younger than a random
        share of ``dht_stale_s`` (per read); a DHT operation fails with probability
        ``dht_loss``."""
        self.rng = rng
        self.link = link or LinkModel()
        self.dht_delay_s = dht_delay_s
        self.dht_loss = dht_loss
        self.dht_stale_s = dht_stale_s
        self.peers: dict[str, MemoryTransport] = {}
        self._links: dict[tuple[str, str], LinkModel] = {}
        self._states: dict[tuple[str, str], _LinkState] = {}
        self._sides: list[frozenset[str]] = []
        self._frozen: set[str] = set()
        self._streams: dict[tuple[str, str], dict[PipeStream, None]] = {}
        # Dictionaries, not sets: the order of breaks must not depend on memory addresses.
        self._versions: dict[str, dict[str, list[_Version]]] = {}
        self._guard = RecordGuard()

    def _note(self, what: str, *details: object) -> None:
        log_event(f"{asyncio.get_running_loop().time():.6f} {what}", *details)

    def now(self) -> float:
        """The network's time, in Unix seconds."""
        return CLOCK_STARTS_UNIX_S + asyncio.get_running_loop().time()

    def transport(self, identity: Identity | None = None) -> "MemoryTransport":
        """Add a peer; without ``identity``, it is drawn from the network's generator."""
        peer = MemoryTransport(self, identity or Identity(self.rng.randbytes(32)))
        self.peers[peer.peer_id] = peer
        return peer

    def set_link(self, source: str, target: str, link: LinkModel) -> None:
        """Set the link of one directed pair of peer ids."""
        self._links[source, target] = link

    def link_of(self, source: str, target: str) -> LinkModel:
        """The link from ``source`` to ``target``."""
        return self._links.get((source, target), self.link)

    def partition(self, *sides: Iterable[str], breaks: bool = False) -> None:
        """Cut the network into groups of peer ids; all other peers form one more group.

        Streams across the cut fall silent, as with a black hole, or break with ``breaks``.
        """
        named = [frozenset(side) for side in sides]
        self._note("cut", *(" ".join(sorted(side)) for side in named))
        rest = frozenset(self.peers) - frozenset().union(*named)
        self._sides = [*named, rest] if rest else named
        if breaks:
            for pair in list(self._streams):
                if self._cut(*pair):
                    self._break(pair, "the network was cut")

    def heal(self) -> None:
        """End the partition: silent streams go on, records reach all peers."""
        self._note("heal")
        self._sides = []
        for authors in self._versions.values():
            for author, versions in authors.items():
                authors[author] = [
                    _Version(data=v.data, record=v.record, stored_s=v.stored_s, side=None)
                    for v in versions
                ]
        self._release()

    def freeze(self, peer_id: str) -> None:
        """Make a peer silent without breaking its streams."""
        self._note("freeze", peer_id)
        self._frozen.add(peer_id)

    def thaw(self, peer_id: str) -> None:
        """Let a frozen peer go on; bytes that were held back arrive now."""
        self._note("thaw", peer_id)
        self._frozen.discard(peer_id)
        self._release()

    def kill(self, peer_id: str) -> None:
        """End a peer as a crash does: its streams break, its handlers are cancelled."""
        self._note("kill", peer_id)
        peer = self.peers.pop(peer_id, None)
        for pair in list(self._streams):
            if peer_id in pair:
                self._break(pair, f"peer {peer_id} is gone")
        if peer is not None:
            peer._crash()

    def silent(self, source: str, target: str) -> bool:
        """Whether no bytes from ``source`` reach ``target`` now."""
        return source in self._frozen or target in self._frozen or self._cut(source, target)

    def _cut(self, one: str, other: str) -> bool:
        return any((one in side) != (other in side) for side in self._sides)

    def _side(self, peer_id: str) -> frozenset[str] | None:
        return next((side for side in self._sides if peer_id in side), None)

    def _break(self, pair: tuple[str, str], reason: str) -> None:
        for stream in self._streams.pop(pair, ()):
            stream.break_off(reason)

    def _release(self) -> None:
        for source, target in list(self._states):
            self._deliver(source, target)

    def _carry(self, source: str, target: str, data: bytes, deliver: Callable[[], None]) -> None:
        """Carry bytes over a link in order, after its queue, delay and retries."""
        link = self.link_of(source, target)
        state = self._states.setdefault((source, target), _LinkState())
        sent_s = max(asyncio.get_running_loop().time(), state.free_at_s)
        if link.bandwidth_bytes_per_s is not None:
            sent_s += len(data) / link.bandwidth_bytes_per_s
        if link.loss and self.rng.random() < link.loss:
            sent_s += RETRY_S + 2 * link.delay_s
        state.free_at_s = sent_s
        state.arrives_s = max(state.arrives_s, sent_s + link.delay_s)
        self._note("send", source, target, data, f"{state.arrives_s:.6f}")
        state.queue.append((state.arrives_s, deliver))
        if len(state.queue) == 1:
            self._deliver(source, target)

    def _deliver(self, source: str, target: str) -> None:
        """Deliver the writes that are due, in the order sent; a timer delivers the rest.

        There is one queue per link, since timers of one instant run in no particular order.
        """
        state = self._states[source, target]
        loop = asyncio.get_running_loop()
        if state.timer is not None:
            state.timer.cancel()
            state.timer = None
        while state.queue and not self.silent(source, target):
            due_s, deliver = state.queue[0]
            if due_s > loop.time() + TICK_S:
                state.timer = loop.call_at(due_s, self._deliver, source, target)
                return
            state.queue.popleft()
            deliver()

    async def _open(self, source: str, target: str, protocol: str) -> PipeStream:
        self._note("open", source, target, protocol)
        there, back = self.link_of(source, target), self.link_of(target, source)
        round_trip_s = there.delay_s + back.delay_s
        lost = any(link.loss and self.rng.random() < link.loss for link in (there, back))
        if lost or round_trip_s > OPEN_LIMIT_S or self.silent(source, target):
            await asyncio.sleep(OPEN_LIMIT_S)
            raise NetworkError(f"peer {target} did not answer within {OPEN_LIMIT_S:.0f} s")
        if round_trip_s:
            await asyncio.sleep(round_trip_s)
        peer = self.peers.get(target)
        if peer is None or source not in self.peers:
            raise NetworkError(f"peer {target} cannot be reached")
        handler = peer.handlers.by_protocol.get(protocol)
        if handler is None:
            raise NetworkError(f"peer {target} does not serve {protocol}")
        forth = Pipe(
            lambda data, deliver: self._carry(source, target, data, deliver),
            unread_bytes_max=there.unread_bytes_max,
        )
        answer = Pipe(
            lambda data, deliver: self._carry(target, source, data, deliver),
            unread_bytes_max=back.unread_bytes_max,
        )
        near, far = PipeStream(target, answer, forth), PipeStream(source, forth, answer)
        pair = (min(source, target), max(source, target))
        streams = self._streams.setdefault(pair, {})
        streams[near] = None
        near.on_close = lambda: streams.pop(near, None)
        peer.handlers.start(handler, far)
        return near

    async def _store(self, author: str, data: bytes) -> bool:
        if not await self._reach_dht(author):
            return False
        now_s = self.now()
        try:
            record = self._guard.admit(data, author=author, now_unix_s=now_s)
        except RecordError:
            return False
        versions = self._versions.setdefault(record.key, {}).setdefault(author, [])
        side = self._side(author)
        versions[:] = [v for v in versions if v.record.expires_unix_s > now_s][-VERSIONS_MAX + 1 :]
        versions.append(_Version(data=data, record=record, stored_s=now_s, side=side))
        self._note("store", author, record.key, data)
        return True

    async def _find(self, reader: str, key: str) -> list[bytes]:
        """The newest version of each author's record that ``reader`` can see."""
        if not await self._reach_dht(reader):
            return []
        now_s = self.now()
        seen_s = now_s - (self.rng.random() * self.dht_stale_s if self.dht_stale_s else 0.0)
        found = []
        for versions in self._versions.get(key, {}).values():
            visible = [
                v
                for v in versions
                if v.stored_s <= seen_s
                and v.record.expires_unix_s > now_s
                and (v.side is None or reader in v.side)
            ]
            if visible:
                newest = max(visible, key=lambda v: (v.record.sequence, v.record.expires_unix_s))
                found.append(newest.data)
        self._note("find", reader, key, *found)
        return found

    async def _reach_dht(self, peer_id: str) -> bool:
        if self.dht_delay_s:
            await asyncio.sleep(self.dht_delay_s)
        if peer_id in self._frozen:
            await asyncio.sleep(OPEN_LIMIT_S)
            return False
        return not (self.dht_loss and self.rng.random() < self.dht_loss)


class MemoryTransport:
    """A :class:`dht.transport.interface.Transport` of a :class:`MemoryNetwork`."""

    def __init__(self, network: MemoryNetwork, identity: Identity) -> None:
        self.handlers = StreamHandlers()
        self._network = network
        self._identity = identity
        self._signer = RecordSigner(identity)
        self._guard = RecordGuard()
        self._closed = False
        self._crashed = asyncio.Event()
        self.clock_ahead_s = 0.0
        """How far this peer's clock is ahead of the network's time."""

    @property
    def peer_id(self) -> str:
        return self._identity.peer_id

    @property
    def addresses(self) -> tuple[str, ...]:
        return (f"/memory/1/p2p/{self.peer_id}",)

    @property
    def stream_errors(self) -> Counter[str]:
        """Number of failed incoming streams, by the type of the error."""
        return self.handlers.errors

    def sign(self, data: bytes) -> bytes:
        return self._identity.sign(data)

    def now(self) -> float:
        return self._network.now() + self.clock_ahead_s

    @property
    def clock_note(self) -> str:
        return ""

    async def serve(self, protocol: str, handler: StreamHandler) -> None:
        self._check_open()
        self.handlers.by_protocol[protocol] = handler

    async def open_stream(
        self, peer_id: str, protocol: str, *, addresses: tuple[str, ...] = ()
    ) -> Stream:
        self._check_open()
        if peer_id != self.peer_id:
            return await self._network._open(self.peer_id, peer_id, protocol)
        return self.handlers.open_to_self(peer_id, protocol)

    async def store(self, key: str, value: bytes, *, expires_unix_s: float) -> bool:
        self._check_open()
        above = self._guard.sequence_of(key, self.peer_id)
        data = self._signer.sign(key, value, expires_unix_s, above)
        return await self._network._store(self.peer_id, data)

    async def get(self, key: str, *, latest: bool = False) -> Mapping[str, bytes]:
        del latest  # every read asks
        self._check_open()
        for data in await self._network._find(self.peer_id, key):
            self._admit(data, key)
        living = self._guard.living(key, self.now())
        return {author: record.payload for author, record in living.items()}

    def contact(self) -> Contact:
        return Contact()  # nobody should know it: a network in memory loses nobody unseen

    def rejoin(self) -> None:
        pass

    async def wait_ended(self) -> str:
        await self._crashed.wait()
        return "this peer was killed"

    async def close(self) -> None:
        if not self._closed:
            self._network.kill(self.peer_id)
        await self.handlers.close()

    def _admit(self, data: bytes, key: str) -> None:
        def check(record: SignedRecord) -> None:
            if record.key != key:
                raise RecordError(f"a record of {record.key[:80]!r} lies under {key!r}")

        # A lagging replica is no error: the guard keeps the newer record.
        with contextlib.suppress(RecordError):
            self._guard.admit(data, check=check, now_unix_s=self.now())

    def _crash(self) -> None:
        self._closed = True
        self._crashed.set()
        self.handlers.cancel()

    def _check_open(self) -> None:
        if self._closed:
            raise NetworkError("this peer has left the network")
