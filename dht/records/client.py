"""Asks full peers for records, without trusting any of them.

Records are signed by their authors, and checked here. A helper can still hide records, so clients
and light peers ask two helpers and take the records of both, and full peers ask a different one
each time (:mod:`dht.records.helper_choice`).
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from dht.budget import Parties
from dht.errors import NetworkError, PeerError
from dht.identity.multiaddr import host_of
from dht.identity.peer_id import short_name
from dht.messages import codec
from dht.messages.peer import (
    KNOWN_BYTES,
    PEER_BOUNDS,
    RecordsBusy,
    RecordsFound,
    RecordsRequest,
    RecordStore,
    RecordStored,
    SignedRecord,
)
from dht.messages.session import Ping, Pong
from dht.messages.types import RECORD_BOUNDS, NodeRecord, NodeState
from dht.process.newest import Newest
from dht.process.supervision import end_all, loop_s
from dht.records.directory import RecordKind
from dht.records.helper import HELPING
from dht.records.helper_choice import CHOOSING, Chance, Helpers
from dht.records.met import Announced, Met
from dht.records.network_clock import CLOCK_S
from dht.records.signed import KEEPING, RecordError, RecordGuard, kind_of
from dht.transport.interface import RECORDS_PROTOCOL, Stream
from dht.transport.other_versions import OtherVersions

T = TypeVar("T")

OpenStream = Callable[[str, str, tuple[str, ...]], Awaitable[Stream]]
"""Opens a stream, given peer id, protocol and addresses."""

FRAME_BYTES_MAX = HELPING.answer_bytes_max + (64 << 10)
PAGES_MAX = KEEPING.total_bytes_max // HELPING.answer_bytes_max + 2


@dataclass(frozen=True, slots=True, kw_only=True)
class AskConfig:
    """How many helpers are asked, and how long each has."""

    lines_max: int = 24
    """Maximum streams kept open; above it the least recently used one is closed."""
    answer_s: float = 5.0
    """Time limit of one answer, including connecting."""
    late_s: float = 1.0
    """Maximum wait for the second helper after the first has answered."""
    rounds: int = 3
    """Maximum pairs of helpers that are tried for one read or write."""
    own_period_s: float = 20.0
    """Time after another peer gave this peer's own record back for which nobody is asked for it."""


ASKING = AskConfig()

_log = logging.getLogger(__name__)


class RecordClient:
    """Asks full peers for records, checks their answers, and gives them this peer's records."""

    def __init__(
        self,
        open_stream: OpenStream,
        now: Callable[[], float],
        given: Mapping[str, tuple[str, ...]],
        rng: Chance,
        *,
        me: str = "",
        guard: RecordGuard | None = None,
        helpers_max: int = CHOOSING.known_max,
        versions: OtherVersions | None = None,
        on_time: Callable[[str, float, str | None], None] | None = None,
        parties: Parties | None = None,
    ) -> None:
        """``given`` are the peers that the owner named, with their addresses. Records go into
        ``guard``; up to ``helpers_max`` more helpers, never ``me``, are learnt from its records.
        ``on_time`` hears which helper said what time it is, in Unix seconds, and the address that
        the owner gave for it, None for one that the owner did not name;
        ``parties`` knows who is a stranger, and where peers' streams come from; None: nobody is.
        """
        self._on_time = on_time
        self._parties = parties or Parties()
        self._open_stream = open_stream
        self._now = now
        self._helpers = Helpers(rng=rng, known_max=helpers_max)
        self._given = dict(given)
        for peer_id, addresses in given.items():
            self._helpers.give(peer_id, addresses)
        self._me = me
        self.guard = RecordGuard() if guard is None else guard
        self._node_keys: Newest[str, None] = Newest(PEER_BOUNDS.keys_asked_max)
        """Keys of node records that were asked for, newest last."""
        self._places: dict[str, tuple[SignedRecord, Announced]] = {}
        """Node record and where it says that its author is, by author."""
        self._met = Met()
        self._lines: dict[str, _Line] = {}
        self._late: dict[asyncio.Future[Any], None] = {}  # in order, so that runs replay
        self._warned = False
        self._versions = versions or OtherVersions()
        self.speak_otherwise: set[str] = set()
        """The given helpers that speak another version of the wire."""
        self.returned_s = -math.inf
        """When another peer gave a record of this peer back, by the loop's clock."""
        self.answered_s = -math.inf
        self.known_s = -math.inf
        """When one that is no stranger answered."""
        self.rejected = 0
        """Number of records from helpers that break the rules."""

    async def read(self, keys: Collection[str]) -> None:
        """Read the records under ``keys`` from two helpers into the guard.

        Raises NetworkError when no helper answers.
        """
        self._learn(keys)
        await self._ask_pair(lambda line: self._read(line, keys))
        self._learn(keys)

    async def read_drawn(self, keys: Collection[str]) -> None:
        """:meth:`read` from one helper drawn at random; up to three are tried.

        Raises NetworkError when no helper answers.
        """
        self._learn(keys)
        tried, errors = set[str](), list[str]()
        for _ in range(ASKING.rounds):
            for peer_id in self._helpers.drawn(loop_s(), 1, tried):
                tried.add(peer_id)
                if await self._ask_one(peer_id, lambda line: self._read(line, keys), errors):
                    self._learn(keys)
                    return
        raise NetworkError(f"no full peer answers: {'; '.join(errors) or 'none is known'}")

    async def store(self, data: bytes) -> bool:
        """Have helpers store this peer's signed record in the DHT; returns whether any did.

        Raises NetworkError when no helper answers.
        """
        return any(await self._ask_pair(lambda line: self._give(line, data, replicate=True)))

    async def push(self, data: bytes, count: int) -> bool:
        """Push this peer's own new record to up to ``count`` helpers drawn at random.

        Returns whether any took it; they tell others when asked.
        """
        errors: list[str] = []
        asked = (
            self._ask_one(p, lambda line: self._give(line, data, replicate=False), errors)
            for p in self._helpers.drawn(loop_s(), count)
        )
        taken = await self._both([asyncio.create_task(each) for each in asked])
        return any(taken)

    async def _give(self, line: "_Line", data: bytes, *, replicate: bool) -> bool:
        answer = await line.ask(RecordStore(record=data, replicate=replicate))
        if not isinstance(answer, RecordStored):
            raise codec.MalformedError(f"a store was answered with {type(answer).__name__}")
        if not answer.taken:
            _log.debug("a record was not taken: %s", answer.reason)
        return answer.taken

    async def greet(self) -> None:
        """Wait until one of the given helpers answers a ping, for as long as the caller does: one
        on a busy machine or a long way off may take its time.

        Raises NetworkError, with the errors, when none can be reached.
        """

        async def ping(line: "_Line") -> None:
            if await line.ask(Ping(nonce=1)) != Pong(nonce=1):
                raise codec.MalformedError("a ping was answered with something else")

        errors: list[str] = []
        asked = (self._ask_one(p, ping, errors, in_time=False) for p in self._given)
        tasks = [asyncio.create_task(each) for each in asked]
        if not await self._both(tasks):
            raise NetworkError(
                "no full peer answers; a peer without the daemon joins through the address of one"
                f" that has it: {'; '.join(errors[:4])}"
            )

    async def close(self) -> None:
        await end_all(self._late)
        streams = [line.stream for line in self._lines.values() if line.stream is not None]
        self._lines.clear()
        await asyncio.gather(*(stream.close() for stream in streams))

    async def _ask_pair(self, ask: Callable[["_Line"], Awaitable[T]]) -> list[T]:
        """The answers of one or two helpers; other pairs are tried where none answers."""
        tried: set[str] = set()
        errors: list[str] = []
        for _ in range(ASKING.rounds):
            pair = self._helpers.pair(loop_s(), tried)
            if not pair:
                break
            tried |= set(pair)
            said = await self._both(
                [asyncio.create_task(self._ask_one(peer_id, ask, errors)) for peer_id in pair]
            )
            if said:
                return said
        raise NetworkError(f"no full peer answers: {'; '.join(errors[:4]) or 'none is known'}")

    async def _both(self, tasks: "list[asyncio.Task[list[T]]]") -> list[T]:
        """The answers of all tasks, except those that take ``ASKING.late_s`` longer than the first.

        A late task goes on in the background, and its records still count once they come.
        """
        pending = set(tasks)
        try:
            while pending:
                answered = any(task.done() and task.result() for task in tasks)
                limit_s = ASKING.late_s if answered else None
                done, pending = await asyncio.wait(
                    pending, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED
                )
                if not done:
                    break
        finally:
            for task in tasks:
                if task in pending:
                    self._mind(task)
        return [answer for task in tasks if task.done() for answer in task.result()]

    async def _ask_one(
        self,
        peer_id: str,
        ask: Callable[["_Line"], Awaitable[T]],
        errors: list[str],
        *,
        in_time: bool = True,
    ) -> list[T]:
        line = self._line(peer_id)
        limit_s = ASKING.answer_s if in_time else None
        try:
            async with asyncio.timeout(limit_s), line.lock:
                if line.stream is None:
                    where = self._helpers.addresses(peer_id)
                    line.stream = await self._open_stream(peer_id, RECORDS_PROTOCOL, where)
                try:
                    answer = await ask(line)
                except BaseException:
                    # A late answer on this stream must not be taken for the next one.
                    self._closing(line)
                    raise
        except (NetworkError, PeerError, TimeoutError) as error:
            if isinstance(error, codec.OtherVersionError):
                self._versions.note(peer_id, error.theirs)
                self.speak_otherwise |= {peer_id} & set(self._given)
            why = str(error) or "no answer in time"
            errors.append(f"{short_name(peer_id)}: {why}")
            _log.debug("helper %s: %s", peer_id, why)
            self._helpers.failed(peer_id, loop_s())
            return []
        self._helpers.answered(peer_id)
        self.answered_s = loop_s()
        if self._parties.knows(peer_id):
            self.known_s = self.answered_s
        self.speak_otherwise.discard(peer_id)
        return [answer]

    def _line(self, peer_id: str) -> "_Line":
        line = self._lines.pop(peer_id, None) or _Line(peer_id)
        self._lines[peer_id] = line  # at the end: ordered by last use
        for other in [p for p, each in self._lines.items() if each is not line]:
            each = self._lines[other]
            if each.unused or (len(self._lines) > ASKING.lines_max and not each.lock.locked()):
                del self._lines[other]
                self._closing(each)
        return line

    def _closing(self, line: "_Line") -> None:
        stream, line.stream = line.stream, None
        if stream is not None:
            self._mind(asyncio.ensure_future(stream.close()))

    def _mind(self, task: asyncio.Future[Any]) -> None:
        """Keep a background task until it is done or :meth:`close` cancels it."""
        self._late[task] = None
        task.add_done_callback(lambda done: self._late.pop(done, None))

    async def _read(self, line: "_Line", keys: Collection[str]) -> None:
        now_s = self._now()
        # Now and then this peer asks for its own record, too: whether others have it, it cannot
        # know in another way.
        asks_for_own = loop_s() - self.returned_s >= ASKING.own_period_s
        held = [
            record.signature[:KNOWN_BYTES]
            for key in keys
            for author, record in self.guard.living(key, now_s).items()
            if not (asks_for_own and author == self._me)
        ]
        for _ in range(PAGES_MAX):
            known = b"".join(held[-2 * RECORD_BOUNDS.peers_max :])
            answer = await line.ask(RecordsRequest(keys=tuple(keys), known=known))
            if not isinstance(answer, RecordsFound):
                raise codec.MalformedError(f"a read was answered with {type(answer).__name__}")
            self._mind_clock(line.peer_id, answer.unix_s)
            before = len(held)
            for number, data in enumerate(answer.records, 1):
                with suppress(RecordError):
                    held.append(self._admit(data, keys, line.peer_id))
                if number % KEEPING.records_a_turn == 0:
                    await asyncio.sleep(0)
            if not answer.more or len(held) == before:
                return

    def _admit(self, data: bytes, keys: Collection[str], helper: str) -> bytes:
        def asked(record: SignedRecord) -> None:
            if record.key not in keys:
                raise RecordError(f"a record of {record.key[:80]!r} was not asked for")
            if record.peer_id == self._me:
                self.returned_s = loop_s()

        try:
            record = self.guard.admit(data, now_unix_s=self._now(), check=asked, storer=helper)
        except RecordError as error:
            self.rejected += 1
            _log.debug("refused a record that %s gave: %s", helper, error)
            raise
        return record.signature[:KNOWN_BYTES]

    def _mind_clock(self, peer_id: str, theirs_unix_s: float) -> None:
        if self._on_time is not None:
            where = self._given.get(peer_id)
            host = None if where is None else host_of(next(iter(where), ""))
            self._on_time(peer_id, theirs_unix_s, host)
        apart_s = theirs_unix_s - self._now()
        if abs(apart_s) > CLOCK_S and not self._warned:
            self._warned = True
            _log.warning("this clock and a full peer's are %.0f s apart: set yours", abs(apart_s))

    def _learn(self, keys: Collection[str]) -> None:
        """Learn helpers from the node records under the keys asked for so far."""
        for key in keys:
            if kind_of(key) is RecordKind.NODES:
                self._node_keys[key] = None
        now_s, before = self._now(), self._places
        self._places = {
            author: before[author]
            if author in before and before[author][0] is signed
            else (signed, _place_in(signed))
            for key in self._node_keys
            for author, signed in self.guard.living(key, now_s).items()
            if author != self._me
        }
        named = {author: place for author, (_, place) in self._places.items()}
        living = {author: place.addresses for author, place in named.items() if place.addresses}
        self._helpers.learn(living)
        self._met.hear(named, loop_s(), self._parties.came_from)

    @property
    def others(self) -> int:
        """Peers that should know this one: named by living records, or met lately; those given,
        while nobody else is known."""
        return len(self._places.keys() | self._met.peers) or len(self._given)

    def absent(self) -> dict[str, tuple[str, ...]]:
        """Full peers met lately of whom nothing is heard any more, to greet now, with their
        addresses."""
        now_s = self._now()
        keys = self._node_keys
        living = {author for key in keys for author in self.guard.living(key, now_s)}
        return self._met.absent(living, loop_s())

    def has_answered(self, peer_id: str) -> None:
        """Note that a peer that was :meth:`absent` has answered a greeting."""
        self._met.answered(peer_id, loop_s())

    @property
    def node_keys(self) -> tuple[str, ...]:
        """The keys of node records that were asked for, newest last."""
        return tuple(self._node_keys)


def _place_in(signed: SignedRecord) -> Announced:
    """The place in a node record; an empty one for a light peer or a malformed record."""
    try:
        record = codec.decode_as(
            NodeRecord, signed.payload, limit_bytes=codec.FRAME_BOUNDS.record_bytes_max
        )
    except codec.MalformedError:
        return Announced()
    if record.light or record.peer_id != signed.peer_id:
        return Announced()
    return Announced(record.addresses, record.state is NodeState.DRAINING)


class _Line:
    """One stream to one helper, which carries one request at a time."""

    def __init__(self, peer_id: str) -> None:
        self.peer_id = peer_id
        self.lock = asyncio.Lock()
        self.stream: Stream | None = None

    async def ask(self, question: object) -> object:
        """The answer to ``question``; raises NetworkError also where the helper is busy."""
        if self.stream is None:
            raise NetworkError("the stream was closed")
        await codec.send_frame(self.stream, question)
        answer = (await codec.read_frame(self.stream, limit_bytes=FRAME_BYTES_MAX)).message
        if isinstance(answer, RecordsBusy):
            raise NetworkError(f"it is busy, for {answer.retry_after_s:.0f} s")
        return answer

    @property
    def unused(self) -> bool:
        """Whether the stream is closed and nobody is opening it."""
        return self.stream is None and not self.lock.locked()
