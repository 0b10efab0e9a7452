"""A light peer's way to the DHT: through full peers, none of which has to be trusted.

Records are signed by their authors and checked here, whoever brought them. What a helper can still
do is to hide records, so two helpers are asked and what either gives counts (:mod:`dht.helpers`).
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from dht import wire
from dht.directory import RecordKind
from dht.errors import NetworkError, PeerError
from dht.helpers import Chance, Helpers
from dht.identity import short_name
from dht.messages import Ping, Pong
from dht.peer_messages import (
    KNOWN_BYTES,
    RecordsBusy,
    RecordsFound,
    RecordsRequest,
    RecordStore,
    RecordStored,
)
from dht.record_helper import ANSWER_BYTES_MAX
from dht.records import KEY_BYTES_MAX, RecordError, RecordGuard, kind_of
from dht.transport import RECORDS_PROTOCOL, Stream
from dht.types import PEERS_MAX, NodeRecord

T = TypeVar("T")

OpenStream = Callable[[str, str, tuple[str, ...]], Awaitable[Stream]]
"""Peer id, protocol, addresses."""

FRAME_BYTES_MAX = ANSWER_BYTES_MAX + (64 << 10)
PAGES_MAX = KEY_BYTES_MAX // ANSWER_BYTES_MAX + 2
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordClientConfig:
    """Times in seconds."""

    answer_s: float = 5.0
    """For one answer, connecting included."""
    late_s: float = 1.0
    """How long the second helper may take beyond the first."""
    rounds: int = 3
    """Pairs of helpers that are tried for one read or write."""
    clock_s: float = 10.0
    """Clocks that differ by more are worth a warning: records live for seconds."""


class RecordClient:
    """Reads and writes the DHT through full peers, and checks what they say."""

    def __init__(
        self,
        open_stream: OpenStream,
        now: Callable[[], float],
        given: Mapping[str, tuple[str, ...]],
        rng: Chance,
        config: RecordClientConfig | None = None,
    ) -> None:
        self._open_stream = open_stream
        self._now = now
        self._config = config or RecordClientConfig()
        self._helpers = Helpers(rng=rng)
        self._given = tuple(given)
        for peer_id, addresses in given.items():
            self._helpers.give(peer_id, addresses)
        self._guard = RecordGuard()
        self._lines: dict[str, _Line] = {}
        self._late: set[asyncio.Future[Any]] = set()
        self._warned = False
        self.rejected = 0
        """Records that helpers gave and that break the rules."""

    async def get(self, key: str) -> Mapping[str, bytes]:
        """The newest payloads under ``key`` by author, of all that were ever read and live.

        Raises NetworkError when no helper answers.
        """

        async def read(line: "_Line") -> None:
            await self._read(line, key)

        await self._ask_pair(read)
        living = self._guard.living(key, self._now())
        if kind_of(key) is RecordKind.NODES:
            self._learn({author: record.payload for author, record in living.items()})
        return {author: record.payload for author, record in living.items()}

    async def store(self, data: bytes) -> bool:
        """Store this peer's own signed record; whether anybody took it.

        Raises NetworkError when no helper answers.
        """

        async def write(line: "_Line") -> bool:
            answer = await line.ask(RecordStore(record=data))
            if not isinstance(answer, RecordStored):
                raise wire.MalformedError(f"a store was answered with {type(answer).__name__}")
            if not answer.taken:
                _log.debug("a record was not taken: %s", answer.reason)
            return answer.taken

        return any(await self._ask_pair(write))

    async def greet(self) -> None:
        """Make sure that one of the helpers that were given is there.

        Raises NetworkError, with what each of them said, when none is.
        """

        async def ping(line: "_Line") -> None:
            if await line.ask(Ping(nonce=1)) != Pong(nonce=1):
                raise wire.MalformedError("a ping was answered with something else")

        errors: list[str] = []
        tasks = [asyncio.create_task(self._ask_one(p, ping, errors)) for p in self._given]
        if not await self._both(tasks):
            raise NetworkError(
                f"no full peer answers: {'; '.join(errors[:4])}; a peer without the daemon joins"
                " through the address of one that has it"
            )

    async def close(self) -> None:
        """Close the streams to all helpers."""
        late = list(self._late)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        streams = [line.stream for line in self._lines.values() if line.stream is not None]
        self._lines.clear()
        await asyncio.gather(*(stream.close() for stream in streams))

    async def _ask_pair(self, ask: Callable[["_Line"], Awaitable[T]]) -> list[T]:
        """What the one or two helpers say who answer; others are tried where none does."""
        tried: set[str] = set()
        errors: list[str] = []
        for _ in range(self._config.rounds):
            pair = self._helpers.pair(self._clock(), tried)
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
        """The answers of all, but of those that are late only until one has come.

        Who is late goes on alone: what it says counts from then on.
        """
        pending = set(tasks)
        try:
            while pending:
                answered = any(task.done() and task.result() for task in tasks)
                limit_s = self._config.late_s if answered else None
                done, pending = await asyncio.wait(
                    pending, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED
                )
                if not done:
                    break
        finally:
            self._late |= pending
            for task in pending:
                task.add_done_callback(self._late.discard)
        return [answer for task in tasks if task.done() for answer in task.result()]

    async def _ask_one(
        self, peer_id: str, ask: Callable[["_Line"], Awaitable[T]], errors: list[str]
    ) -> list[T]:
        line = self._line(peer_id)
        try:
            async with asyncio.timeout(self._config.answer_s), line.lock:
                if line.stream is None:
                    where = self._helpers.addresses(peer_id)
                    line.stream = await self._open_stream(peer_id, RECORDS_PROTOCOL, where)
                try:
                    answer = await ask(line)
                except BaseException:
                    # Its answer may still come, and must not be taken for the next one.
                    self._closing(line)
                    raise
        except (NetworkError, PeerError, TimeoutError) as error:
            why = str(error) or "no answer in time"
            errors.append(f"{short_name(peer_id)}: {why}")
            _log.debug("helper %s: %s", peer_id, why)
            self._helpers.failed(peer_id, self._clock())
            return []
        self._helpers.answered(peer_id)
        return [answer]

    def _line(self, peer_id: str) -> "_Line":
        line = self._lines.get(peer_id)
        if line is None:
            for other in [p for p, each in self._lines.items() if each.unused]:
                del self._lines[other]
            line = self._lines[peer_id] = _Line(peer_id)
        return line

    def _closing(self, line: "_Line") -> None:
        stream, line.stream = line.stream, None
        if stream is not None:
            task = asyncio.ensure_future(stream.close())
            self._late.add(task)
            task.add_done_callback(self._late.discard)

    async def _read(self, line: "_Line", key: str) -> None:
        held = [
            record.signature[:KNOWN_BYTES]
            for record in self._guard.living(key, self._now()).values()
        ]
        for _ in range(PAGES_MAX):
            known = b"".join(held[-PEERS_MAX:])
            answer = await line.ask(RecordsRequest(key=key, known=known))
            if not isinstance(answer, RecordsFound):
                raise wire.MalformedError(f"a read was answered with {type(answer).__name__}")
            self._mind_clock(answer.unix_s)
            for data in answer.records:
                with suppress(RecordError):
                    held.append(self._admit(data, key, line.peer_id))
            if not answer.more or not answer.records:
                return

    def _admit(self, data: bytes, key: str, helper: str) -> bytes:
        try:
            record = self._guard.admit(data, key=key, now_unix_s=self._now(), storer=helper)
        except RecordError as error:
            self.rejected += 1
            _log.debug("refused a record that %s gave: %s", helper, error)
            raise
        return record.signature[:KNOWN_BYTES]

    def _mind_clock(self, theirs_unix_s: float) -> None:
        apart_s = theirs_unix_s - self._now()
        if abs(apart_s) > self._config.clock_s and not self._warned:
            self._warned = True
            _log.warning("this clock and a full peer's are %.0f s apart: set yours", abs(apart_s))

    def _learn(self, payloads: Mapping[str, bytes]) -> None:
        """Take up the full peers among those that announce themselves."""
        living: dict[str, tuple[str, ...]] = {}
        for author, payload in payloads.items():
            with suppress(wire.MalformedError):
                record = wire.decode_as(NodeRecord, payload, limit_bytes=wire.RECORD_BYTES_MAX)
                if record.peer_id == author and record.addresses and not record.light:
                    living[author] = record.addresses
        self._helpers.learn(living)

    @staticmethod
    def _clock() -> float:
        return asyncio.get_running_loop().time()


class _Line:
    """One stream to one helper; questions on it are asked one after the other."""

    def __init__(self, peer_id: str) -> None:
        self.peer_id = peer_id
        self.lock = asyncio.Lock()
        self.stream: Stream | None = None

    async def ask(self, question: object) -> object:
        """The answer to ``question``; NetworkError also where the helper has no time."""
        if self.stream is None:
            raise NetworkError("the stream was closed")
        await wire.send_frame(self.stream, question)
        answer = (await wire.read_frame(self.stream, limit_bytes=FRAME_BYTES_MAX)).message
        if isinstance(answer, RecordsBusy):
            raise NetworkError(f"it is busy, for {answer.retry_after_s:.0f} s")
        return answer

    @property
    def unused(self) -> bool:
        """Whether nobody asks or could ask on it."""
        return self.stream is None and not self.lock.locked()
