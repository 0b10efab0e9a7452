"""The DHT through full peers: what a light peer reads and writes, and what helpers cannot do."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace

import pytest

from dht.budget import (
    RECORD_BYTES,
    RECORD_REQUESTS,
    RECORD_SEARCHES,
    RECORD_STREAMS,
    Buckets,
    Budget,
)
from dht.errors import NetworkError
from dht.identity.peer_id import Identity
from dht.messages import codec
from dht.messages.peer import (
    KNOWN_BYTES,
    RecordsBusy,
    RecordsFound,
    RecordsRequest,
    RecordStore,
    RecordStored,
    SignedRecord,
)
from dht.messages.session import Ping, Pong
from dht.records.client import RecordClient
from dht.records.helper import HELPING, RecordHelper
from dht.records.signed import KEEPING, RecordError, RecordGuard, sign_record
from dht.transport.interface import RECORDS_PROTOCOL, Stream
from dht.transport.requests import REQUESTS_ON_STREAMS
from testing.clock import run_virtual
from testing.network import MemoryNetwork, MemoryTransport

KEY = "net/model/links"
ALICE, BOB, EVE = (Identity(name * 32) for name in (b"a", b"b", b"e"))


class Shelf:
    """A full peer's part of a DHT that is one dictionary for all of them."""

    def __init__(self, network: MemoryNetwork, values: dict[str, dict[str, bytes]]) -> None:
        self._network = network
        self._values = values
        self._guard = RecordGuard()
        self.searches = 0
        self.broken = False
        self.followed: set[str] = set()

    def now(self) -> float:
        return self._network.now()

    async def find_signed(self, key: str) -> None:
        self.searches += 1
        await asyncio.sleep(0.02)
        if self.broken:
            raise NetworkError("the DHT does not answer")
        for data in self._values.get(key, {}).values():
            try:
                self._guard.admit(data, now_unix_s=self.now())
            except RecordError:
                continue

    def known_signed(self, key: str) -> Mapping[str, SignedRecord]:
        return self._guard.living(key, self.now())

    def fresh(self, key: str) -> bool:
        return key in self.followed

    def keep_signed(self, data: bytes, sender: str) -> SignedRecord:
        return self._guard.admit(data, author=sender, now_unix_s=self.now(), storer=sender)

    async def store_signed(self, record: SignedRecord, data: bytes) -> bool:
        self._values.setdefault(record.key, {})[record.peer_id] = data
        return True


class World:
    """Full peers over some values, and a light peer that asks them."""

    def __init__(self, helpers: int = 2, limits: Budget | None = None) -> None:
        self.network = MemoryNetwork(random.Random(3))
        self.values: dict[str, dict[str, bytes]] = {}
        self.full = [self.network.transport() for _ in range(helpers)]
        self.shelves = [Shelf(self.network, self.values) for _ in self.full]
        self.helpers = [RecordHelper(shelf, limits) for shelf in self.shelves]
        self.light = self.network.transport()
        self.client = self.asker(self.light, self.full)

    def asker(self, light: MemoryTransport, full: list[MemoryTransport]) -> RecordClient:
        async def open_stream(peer_id: str, protocol: str, where: tuple[str, ...]) -> Stream:
            return await light.open_stream(peer_id, protocol, addresses=where)

        given = {peer.peer_id: peer.addresses for peer in full}
        return RecordClient(open_stream, self.network.now, given, random.Random(1))

    async def read(self, key: str, client: RecordClient | None = None) -> dict[str, bytes]:
        """What ``client`` knows of ``key`` once it has asked."""
        client = client or self.client
        await client.read((key,))
        living = client.guard.living(key, self.network.now())
        return {author: record.payload for author, record in living.items()}

    async def start(self) -> None:
        for peer, helper in zip(self.full, self.helpers, strict=True):
            await peer.serve(RECORDS_PROTOCOL, helper.serve)

    def signed(self, identity: Identity, payload: bytes, left_s: float = 60.0) -> bytes:
        return sign_record(identity, KEY, payload, self.network.now() + left_s)

    def put(self, identity: Identity, payload: bytes, left_s: float = 60.0) -> None:
        data = self.signed(identity, payload, left_s)
        self.values.setdefault(KEY, {})[identity.peer_id] = data


def within(body: Callable[[], Awaitable[None]], limit_s: float = 200.0) -> None:
    async def run() -> None:
        await body()

    run_virtual(run(), limit_s=limit_s)


def hiding(given: list[bytes]) -> Callable[[Stream], Awaitable[None]]:
    """A helper that answers whatever it likes."""

    async def serve(stream: Stream) -> None:
        while True:
            message = (await codec.read_frame(stream)).message
            if isinstance(message, RecordStore):
                await codec.send_frame(stream, RecordStored(taken=True))
                continue
            await codec.send_frame(
                stream, RecordsFound(records=tuple(given), more=False, unix_s=1.0)
            )

    return serve


def test_what_is_in_the_dht_is_read_and_written_through_full_peers() -> None:
    async def body() -> None:
        world = World()
        await world.start()
        world.put(ALICE, b"one")
        assert await world.read(KEY) == {ALICE.peer_id: b"one"}
        mine = world.light._signer.sign(KEY, b"mine", world.network.now() + 60)
        assert await world.client.store(mine)
        found = await world.read(KEY)
        assert found == {ALICE.peer_id: b"one", world.light.peer_id: b"mine"}
        await world.client.close()

    within(body)


def test_only_the_asker_s_own_records_are_stored_for_it() -> None:
    async def body() -> None:
        world = World()
        await world.start()
        assert not await world.client.store(world.signed(ALICE, b"of somebody else"))
        assert not await world.client.store(b"nonsense")
        assert world.values == {}
        assert all(helper.counters["stores_refused"] == 2 for helper in world.helpers)

    within(body)


def test_one_helper_that_hides_records_hides_nothing_where_another_gives_them() -> None:
    async def body() -> None:
        world = World()
        await world.start()
        await world.full[0].serve(RECORDS_PROTOCOL, hiding([]))
        world.put(ALICE, b"one")
        assert await world.read(KEY) == {ALICE.peer_id: b"one"}

    within(body)


def test_what_a_helper_makes_up_is_refused() -> None:
    async def body() -> None:
        world = World(helpers=1)
        honest = world.signed(ALICE, b"honest")
        forged = bytearray(world.signed(BOB, b"forged!"))
        forged[forged.index(b"forged!")] ^= 1
        elsewhere = sign_record(EVE, "net/other/links", b"elsewhere", world.network.now() + 60)
        expired = world.signed(EVE, b"expired", left_s=-1.0)
        endless = world.signed(EVE, b"endless", left_s=1e6)
        bad = [bytes(forged), elsewhere, expired, endless, b"", b"\xff" * 5000]
        await world.full[0].serve(RECORDS_PROTOCOL, hiding([*bad, honest]))
        assert await world.read(KEY) == {ALICE.peer_id: b"honest"}
        assert world.client.rejected == len(bad)

    within(body)


def test_others_get_the_loop_between_a_helpers_records() -> None:
    """A helper's answer has up to 4,096 records, and each takes the check of a signature."""
    turns = 0

    async def body() -> None:
        async def count() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        world = World(helpers=1)
        forged = world.signed(ALICE, b"forged")[:-1] + b"\x05"
        await world.full[0].serve(RECORDS_PROTOCOL, hiding([forged] * 100 * KEEPING.records_a_turn))
        await world.read(KEY)  # which connects
        world.client.rejected = 0
        counting, before = asyncio.create_task(count()), turns
        await world.read(KEY)
        counting.cancel()
        assert turns - before >= world.client.rejected // KEEPING.records_a_turn == 100

    within(body)


def test_a_helper_that_promises_more_and_brings_nothing_is_asked_once() -> None:
    asked = 0

    async def promising(stream: Stream) -> None:
        nonlocal asked
        while True:
            await codec.read_frame(stream)
            asked += 1
            await codec.send_frame(stream, RecordsFound(records=(b"x",), more=True, unix_s=1.0))

    async def body() -> None:
        world = World(helpers=1)
        await world.full[0].serve(RECORDS_PROTOCOL, promising)
        assert await world.read(KEY) == {}
        assert asked == 1

    within(body)


def test_the_time_of_who_was_not_named_counts_at_no_address() -> None:
    """Records say where their authors are: whoever writes them may say anything."""
    heard: dict[str, str | None] = {}

    async def body() -> None:
        world = World(helpers=2)
        await world.start()
        named, other = world.full

        async def open_stream(peer_id: str, protocol: str, where: tuple[str, ...]) -> Stream:
            return await world.light.open_stream(peer_id, protocol)

        client = RecordClient(
            open_stream,
            world.network.now,
            {named.peer_id: ("/ip4/203.0.113.7/tcp/1",)},
            random.Random(1),
            on_time=lambda peer_id, unix_s, host: heard.update({peer_id: host}),
        )
        client._helpers.learn({other.peer_id: ("/ip4/192.0.2.7/tcp/1",)})
        await client.read((KEY,))
        assert heard == {named.peer_id: "203.0.113.7", other.peer_id: None}

    within(body)


def test_reads_never_go_back_in_time() -> None:
    async def body() -> None:
        world = World(helpers=1)
        old, new = world.signed(ALICE, b"old", 30.0), world.signed(ALICE, b"new", 60.0)
        await world.full[0].serve(RECORDS_PROTOCOL, hiding([new]))
        assert await world.read(KEY) == {ALICE.peer_id: b"new"}
        await world.client.close()
        await world.full[0].serve(RECORDS_PROTOCOL, hiding([old]))
        assert await world.read(KEY) == {ALICE.peer_id: b"new"}

    within(body)


def test_a_silent_helper_costs_a_second_and_a_dead_one_nothing() -> None:
    async def body() -> None:
        world = World(helpers=3)
        await world.start()
        world.put(ALICE, b"one")
        clock = asyncio.get_running_loop().time
        world.network.freeze(world.full[0].peer_id)
        started_s = clock()
        assert ALICE.peer_id in await world.read(KEY)
        assert clock() - started_s <= 1.2
        world.network.kill(world.full[1].peer_id)
        world.network.kill(world.full[2].peer_id)
        with pytest.raises(NetworkError, match="no full peer answers"):
            await world.read(KEY)
        world.network.thaw(world.full[0].peer_id)
        await asyncio.sleep(70)
        world.put(ALICE, b"two")
        assert await world.read(KEY) == {ALICE.peer_id: b"two"}
        await world.client.close()

    within(body)


def test_nothing_is_sent_twice_and_long_answers_come_in_parts() -> None:
    async def body() -> None:
        world = World(helpers=1)
        await world.start()
        for number in range(400):
            world.put(Identity(number.to_bytes(32, "big")), b"x" * 4000)
        answers: list[RecordsFound] = []
        answered = world.helpers[0]._answer

        async def noted(peer_id: str, message: object) -> object:
            answer = await answered(peer_id, message)
            answers.append(answer)  # type: ignore[arg-type]
            return answer

        world.helpers[0]._answer = noted  # type: ignore[assignment, method-assign]
        assert len(await world.read(KEY)) == 400
        assert len(answers) == 2
        assert all(sum(map(len, a.records)) <= HELPING.answer_bytes_max for a in answers)
        assert len(await world.read(KEY)) == 400
        assert answers[-1].records == ()

    within(body)


def test_those_who_ask_at_once_share_one_search() -> None:
    async def body() -> None:
        world = World(helpers=1)
        await world.start()
        world.put(ALICE, b"one")
        askers = [world.asker(world.network.transport(), world.full) for _ in range(30)]
        found = await asyncio.gather(*(world.read(KEY, asker) for asker in askers))
        assert all(one == {ALICE.peer_id: b"one"} for one in found)
        assert world.shelves[0].searches == 1

    within(body)


def test_who_asks_more_than_his_share_is_put_off_and_others_are_not() -> None:
    async def body() -> None:
        limits = Budget(replace(RECORD_REQUESTS, per_s=1.0, burst=10.0))
        world = World(helpers=1, limits=limits)
        await world.start()
        world.put(ALICE, b"one")
        for _ in range(10):
            await world.read(KEY)
        with pytest.raises(NetworkError, match="busy"):
            await world.read(KEY)
        other = world.asker(world.network.transport(), world.full)
        assert await world.read(KEY, other) == {ALICE.peer_id: b"one"}
        await asyncio.sleep(10)
        assert await world.read(KEY) == {ALICE.peer_id: b"one"}

    within(body)


def test_searches_for_ever_new_keys_are_bounded_for_all_together() -> None:
    async def body() -> None:
        limits = Budget(replace(RECORD_SEARCHES, all_per_s=0.0, all_burst=5.0))
        world = World(helpers=1, limits=limits)
        await world.start()
        for number in range(5):
            assert await world.read(f"net/model{number}/links") == {}
        for number in range(5, 20):
            with pytest.raises(NetworkError, match="busy"):
                await world.read(f"net/model{number}/links")
        assert world.shelves[0].searches == 5
        assert world.helpers[0].budget.refused["record_searches"] == 15

    within(body)


def test_records_that_are_looked_at_count_though_the_asker_has_them() -> None:
    """To leave out 4,096 known records under each of 16 equal keys took 23 ms, and was free."""

    async def body() -> None:
        limits = Budget(replace(RECORD_BYTES, per_s=0.0, burst=35.0 * HELPING.looked_at_bytes))
        world = World(helpers=1, limits=limits)
        for number in range(10):
            world.put(Identity(number.to_bytes(32, "big")), b"x")
        world.shelves[0].followed.add(KEY)
        await world.shelves[0].find_signed(KEY)
        signed = world.shelves[0].known_signed(KEY).values()
        known = b"".join(each.signature[:KNOWN_BYTES] for each in signed)
        request = RecordsRequest(keys=(KEY,) * 16, known=known)
        answers = [await world.helpers[0]._answer("asker", request) for _ in range(5)]
        assert [isinstance(each, RecordsBusy) for each in answers] == [False] * 4 + [True]

    within(body)


def test_one_peer_s_searches_leave_the_others_theirs() -> None:
    async def body() -> None:
        world = World(helpers=1)
        await world.start()
        world.put(ALICE, b"one")
        refused = 0
        for number in range(150):
            try:
                await world.read(f"net/model{number}/links")
            except NetworkError:
                refused += 1
        assert refused >= 100
        other = world.asker(world.network.transport(), world.full)
        assert await world.read(KEY, other) == {ALICE.peer_id: b"one"}
        # What somebody else has had read costs no search.
        assert await world.read(KEY) == {ALICE.peer_id: b"one"}

    within(body)


@pytest.mark.parametrize("why", ["broken", "spared"])
def test_helpers_that_cannot_search_are_busy_and_others_are_asked(why: str) -> None:
    async def body() -> None:
        world = World(helpers=3)
        await world.start()
        world.put(ALICE, b"one")

        def cripple(number: int) -> None:
            if why == "broken":
                world.shelves[number].broken = True
            else:
                world.helpers[number]._searches = Buckets(per_s=0.0, burst=0.0)

        cripple(0)
        cripple(1)
        assert await world.read(KEY) == {ALICE.peer_id: b"one"}
        cripple(2)
        await asyncio.sleep(1)  # beyond what was read just now
        newcomer = world.asker(world.network.transport(), world.full)
        with pytest.raises(NetworkError, match="busy"):
            await world.read(KEY, newcomer)

    within(body)


def test_what_was_read_just_now_is_given_though_no_search_is_left() -> None:
    async def body() -> None:
        world = World(
            helpers=1, limits=Budget(replace(RECORD_SEARCHES, all_per_s=0.0, all_burst=1.0))
        )
        await world.start()
        world.put(ALICE, b"one")
        for _ in range(3):
            assert await world.read(KEY) == {ALICE.peer_id: b"one"}
        assert world.shelves[0].searches == 1

    within(body)


@pytest.mark.parametrize("key", ["", "net/model/secrets", "x" * 600, "//nodes"])
def test_a_key_of_no_known_form_ends_the_stream(key: str) -> None:
    async def body() -> None:
        world = World(helpers=1)
        await world.start()
        stream = await world.light.open_stream(world.full[0].peer_id, RECORDS_PROTOCOL)
        await codec.send_frame(stream, RecordsRequest(keys=(key,)))
        with pytest.raises(NetworkError):
            await codec.read_frame(stream)
        assert world.shelves[0].searches == 0

    within(body)


def test_streams_of_one_peer_are_bounded_and_silent_ones_end() -> None:
    async def body() -> None:
        world = World(helpers=1)
        await world.start()
        streams = [
            await world.light.open_stream(world.full[0].peer_id, RECORDS_PROTOCOL) for _ in range(6)
        ]
        await asyncio.sleep(1)
        assert world.helpers[0].budget.refused["record_streams"] == 2
        await asyncio.sleep(200)
        for stream in streams:
            with pytest.raises(NetworkError):
                await stream.read_exactly(1)
        assert not world.helpers[0]._streams.by_peer

    within(body, limit_s=1000)


class DeafStream:
    """A stream to a peer that asks and never reads."""

    remote_host = ""

    def __init__(self, remote_peer_id: str) -> None:
        self.remote_peer_id = remote_peer_id
        self.closed = False
        self._unread = codec.encode_frame(Ping(nonce=1))

    async def read_exactly(self, count: int) -> bytes:
        data, self._unread = self._unread[:count], self._unread[count:]
        return data

    def write(self, data: bytes) -> None:
        pass

    async def drain(self) -> None:
        await asyncio.Event().wait()

    async def close(self) -> None:
        self.closed = True


def test_who_never_reads_loses_the_stream() -> None:
    async def body() -> None:
        helper = World(helpers=1).helpers[0]
        deaf = [DeafStream(str(number)) for number in range(RECORD_STREAMS.in_all)]
        tasks = [asyncio.create_task(helper.serve(stream)) for stream in deaf]
        await asyncio.sleep(1)
        assert helper._streams.total == RECORD_STREAMS.in_all
        await helper.serve(DeafStream("one more"))  # nobody is idle who could give way
        assert helper.budget.refused["record_streams"] == 1
        await asyncio.sleep(REQUESTS_ON_STREAMS.send_limit_s)
        assert all(task.done() for task in tasks)
        assert all(stream.closed for stream in deaf)
        assert helper.counters["streams_stuck"] == RECORD_STREAMS.in_all
        assert not helper._streams.by_peer

    within(body)


def test_where_all_streams_are_taken_the_longest_idle_one_gives_way() -> None:
    async def body() -> None:
        world = World(helpers=1)
        await world.start()
        world.put(ALICE, b"one")
        full, helper = world.full[0].peer_id, world.helpers[0]
        streams = []
        for _ in range(RECORD_STREAMS.in_all // RECORD_STREAMS.per_peer):
            peer = world.network.transport()
            streams += [
                await peer.open_stream(full, RECORDS_PROTOCOL)
                for _ in range(RECORD_STREAMS.per_peer)
            ]
        await asyncio.sleep(1)
        await codec.send_frame(streams[0], Ping(nonce=1))
        assert (await codec.read_frame(streams[0])).message == Pong(nonce=1)
        assert await world.read(KEY) == {ALICE.peer_id: b"one"}
        assert helper.counters["streams_displaced"] == 1
        assert helper._streams.total == RECORD_STREAMS.in_all
        with pytest.raises(NetworkError):
            await streams[1].read_exactly(1)
        for stream in (streams[0], streams[2], streams[-1]):
            await codec.send_frame(stream, Ping(nonce=2))
            assert (await codec.read_frame(stream)).message == Pong(nonce=2)

    within(body)


def test_no_stranger_ends_a_stream_where_all_are_taken() -> None:
    """Each attempt ended the one that was idle for longest, and was refused then."""

    async def body() -> None:
        world = World(helpers=1)
        await world.start()
        full, helper = world.full[0].peer_id, world.helpers[0]
        streams: list[Stream] = []
        for _ in range(RECORD_STREAMS.in_all // RECORD_STREAMS.per_peer):
            peer = world.network.transport()
            streams += [
                await peer.open_stream(full, RECORDS_PROTOCOL)
                for _ in range(RECORD_STREAMS.per_peer)
            ]
        await asyncio.sleep(1)
        helper.budget.parties.trust_nobody()
        stranger = await world.network.transport().open_stream(full, RECORDS_PROTOCOL)
        with pytest.raises(NetworkError):
            await stranger.read_exactly(1)
        assert helper.counters["streams_displaced"] == 0
        assert helper._streams.total == RECORD_STREAMS.in_all

    within(body)


def test_greeting_says_what_is_wrong_with_each() -> None:
    async def body() -> None:
        world = World()
        with pytest.raises(NetworkError, match="no full peer answers"):
            await world.client.greet()
        await world.full[1].serve(RECORDS_PROTOCOL, world.helpers[1].serve)
        await world.client.greet()

    within(body)


def test_a_greeting_waits_for_a_slow_helper_as_long_as_its_caller() -> None:
    async def body() -> None:
        world = World(helpers=1)

        async def slow(stream: Stream) -> None:
            message = (await codec.read_frame(stream)).message
            assert isinstance(message, Ping)
            await asyncio.sleep(9.0)
            await codec.send_frame(stream, Pong(nonce=message.nonce))

        await world.full[0].serve(RECORDS_PROTOCOL, slow)
        await world.client.greet()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(3.0):
                await world.asker(world.light, world.full).greet()

    within(body)
