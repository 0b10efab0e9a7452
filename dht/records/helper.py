"""Answers other peers' requests for records, as a full peer.

For keys that it follows it answers from its replica, at once; for others it searches the DHT. The
helper is not trusted: records that it gives are signed by their authors, records that it takes are
signed by the sender. Its work is bounded by requests and bytes of each peer, and by searches of
each and of all peers. It takes only a peer's own records: no peer can hide behind another.
"""

import asyncio
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dht.budget import (
    RECORD_BYTES,
    RECORD_REQUESTS,
    RECORD_SEARCHES,
    RECORD_STORES,
    RECORD_STREAMS,
    Budget,
)
from dht.errors import NetworkError
from dht.messages import codec
from dht.messages.peer import (
    KNOWN_BYTES,
    RecordsBusy,
    RecordsFound,
    RecordsRequest,
    RecordStore,
    RecordStored,
)
from dht.messages.session import Ping, Pong
from dht.process.newest import Newest
from dht.records.signed import RecordError, kind_of, open_record
from dht.transport.interface import Stream
from dht.transport.requests import REQUESTS_ON_STREAMS

if TYPE_CHECKING:
    from dht.records.access import SharedRecords


@dataclass(frozen=True, slots=True, kw_only=True)
class HelperConfig:
    """Bounds of what a helper reads, answers and searches."""

    answer_bytes_max: int = 1 << 20
    request_bytes_max: int = 128 << 10
    looked_at_bytes: int = 32
    """What each record that is looked at counts for, sent or not: an asker that knows all of them
    gets none, and thousands take milliseconds."""
    fresh_s: float = 0.5
    """Time for which a key that was searched is not searched again for the next asker."""
    searched_max: int = 512
    silence_limit_s: float = 180.0


HELPING = HelperConfig()


class RecordHelper:
    """Answers the streams of :data:`dht.transport.interface.RECORDS_PROTOCOL`."""

    def __init__(self, records: "SharedRecords", budget: Budget | None = None) -> None:
        self._records = records
        self.budget = budget = budget or Budget()
        self._requests = budget.rate(RECORD_REQUESTS)
        self._bytes = budget.rate(RECORD_BYTES)
        self._stores = budget.rate(RECORD_STORES)
        self._searches = budget.rate(RECORD_SEARCHES)
        self._streams = budget.held(RECORD_STREAMS)
        self._open: dict[Stream, str] = {}
        """Whose the counted streams are."""
        self._idle: dict[Stream, None] = {}
        """Streams that wait for a request, longest-waiting first."""
        self._read_s: Newest[str, float] = Newest(HELPING.searched_max)
        self._reading: dict[str, asyncio.Task[None]] = {}
        self.counters: Counter[str] = Counter()

    async def serve(self, stream: Stream) -> None:
        """Answer the requests on one stream, one after the other, until it ends."""
        peer_id = stream.remote_peer_id
        if not await self._take_stream(peer_id):
            await stream.close()
            return
        self._open[stream] = peer_id
        try:
            while await self._serve_one(peer_id, stream):
                pass
            await stream.close()  # the asker must see that no more requests are read
        finally:
            self._release(stream)

    def _release(self, stream: Stream) -> None:
        if (peer_id := self._open.pop(stream, None)) is not None:
            self._streams.give_back(peer_id)

    async def _take_stream(self, peer_id: str) -> bool:
        """Whether there is room for one more stream; the longest idle one gives way to a peer that
        may have it: while all are taken, that is no stranger."""
        streams = self._streams
        mine, most = streams.by_peer[peer_id], streams.limit
        is_full = streams.total >= most.in_all and self.budget.parties.knows(peer_id)
        if mine < most.per_peer and is_full and self._idle:
            longest_idle = next(iter(self._idle))
            del self._idle[longest_idle]
            self.counters["streams_displaced"] += 1
            self._release(longest_idle)
            await longest_idle.close()  # which ends its task
        return streams.take(peer_id)

    async def _serve_one(self, peer_id: str, stream: Stream) -> bool:
        """Answer the next request; False when none comes or the answer is not read in time."""
        self._idle[stream] = None
        try:
            async with asyncio.timeout(HELPING.silence_limit_s):
                frame = await codec.read_frame(stream, limit_bytes=HELPING.request_bytes_max)
        except TimeoutError:
            return False
        finally:
            self._idle.pop(stream, None)
        answer = await self._answer(peer_id, frame.message)
        try:
            async with asyncio.timeout(REQUESTS_ON_STREAMS.send_limit_s):
                await codec.send_frame(stream, answer)
        except TimeoutError:
            self.counters["streams_stuck"] += 1
            return False
        return True

    async def _answer(
        self, peer_id: str, message: object
    ) -> RecordsFound | RecordStored | RecordsBusy | Pong:
        now_s = asyncio.get_running_loop().time()
        if not self._requests.take(peer_id, 1, now_s):
            return self._busy()
        match message:
            case Ping(nonce=nonce):
                return Pong(nonce=nonce)
            case RecordsRequest(keys=keys, known=known):
                if not self._bytes.take(peer_id, 1, now_s):
                    return self._busy()
                found = await self._find(peer_id, keys, known, now_s)
                if found is None:
                    return self._busy()
                size_bytes = sum(map(len, found.records))
                self._bytes.charge(peer_id, size_bytes, now_s)
                return found
            case RecordStore(record=record, replicate=replicate):
                if not self._stores.take(peer_id, 1, now_s):
                    return self._busy()
                return await self._store(peer_id, record, replicate=replicate)
            case other:
                raise codec.MalformedError(f"{type(other).__name__} is no request for records")

    def _busy(self) -> RecordsBusy:
        self.counters["refused"] += 1
        return RecordsBusy(retry_after_s=1.0)

    async def _find(
        self, peer_id: str, keys: tuple[str, ...], known: bytes, now_s: float
    ) -> RecordsFound | None:
        """The records under ``keys``; None where the DHT was not read: the asker asks others."""
        keys = tuple(dict.fromkeys(keys))
        for key in keys:
            kind_of(key)  # raises RecordError for a malformed key, which ends the stream
        self.counters["reads"] += 1
        stale = [key for key in keys if not self._records.fresh(key)]
        if not all(await asyncio.gather(*(self._read(peer_id, key, now_s) for key in stale))):
            return None
        left_out = {known[at : at + KNOWN_BYTES] for at in range(0, len(known), KNOWN_BYTES)}
        given: list[bytes] = []
        size_bytes, more = 0, False
        under = [self._records.known_signed(key) for key in keys]
        self._bytes.charge(peer_id, HELPING.looked_at_bytes * sum(map(len, under)), now_s)
        for record in (record for living in under for record in living.values()):
            if record.signature[:KNOWN_BYTES] in left_out:
                continue
            data = codec.encode(record)
            size_bytes += len(data)
            if size_bytes > HELPING.answer_bytes_max:
                more = True
                break
            given.append(data)
        return RecordsFound(records=tuple(given), more=more, unix_s=self._records.now())

    async def _read(self, peer_id: str, key: str, now_s: float) -> bool:
        """Search the DHT for ``key``, unless that was done just now; simultaneous askers share it.

        Returns whether it was searched: without a search, the replica may miss all records.
        """
        if now_s - self._read_s.get(key, -1e9) < HELPING.fresh_s:
            return True
        reading = self._reading.get(key)
        if reading is None:
            if not self._searches.take(peer_id, 1, now_s):
                return False
            reading = asyncio.create_task(self._records.find_signed(key))
            self._reading[key] = reading
            reading.add_done_callback(lambda done: self._have_read(key, done))
        try:
            # Shielded: an asker that leaves must not end the search for the others.
            await asyncio.shield(reading)
        except NetworkError:
            self.counters["searches_failed"] += 1
            return False
        return True

    def _have_read(self, key: str, done: "asyncio.Task[None]") -> None:
        del self._reading[key]
        if not done.cancelled() and done.exception() is None:
            self._read_s[key] = asyncio.get_running_loop().time()

    async def _store(self, peer_id: str, data: bytes, *, replicate: bool) -> RecordStored:
        self.counters["stores"] += 1
        try:
            # Another author's record would count as brought by this peer, and hide its bringer.
            if not replicate:
                self._records.keep_signed(data, peer_id)
                return RecordStored(taken=True)
            record = open_record(data, author=peer_id, now_unix_s=self._records.now())
        except RecordError as error:
            self.counters["stores_refused"] += 1
            return RecordStored(taken=False, reason=str(error)[:512])
        self._read_s.pop(record.key, None)  # the writer may want to read it back
        try:
            return RecordStored(taken=await self._records.store_signed(record, data))
        except NetworkError as error:
            return RecordStored(taken=False, reason=str(error)[:512])
