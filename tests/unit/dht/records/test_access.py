"""Full peers tell each other what is new: how soon, at what cost, and what liars can do to it."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable

import pytest

from dht.identity.peer_id import Identity
from dht.messages import codec
from dht.messages.peer import RecordsFound, RecordStore, RecordStored, SignedRecord
from dht.records.access import AccessConfig, AskedRecords, SharedRecords
from dht.records.directory import RecordKind, record_key
from dht.records.helper import RecordHelper
from dht.records.signed import RecordError, RecordGuard, RecordSigner, sign_record
from dht.transport.interface import RECORDS_PROTOCOL, Stream
from testing.clock import run_virtual
from testing.network import LinkModel, MemoryNetwork
from tests.unit.records import record_of

CONFIG = AccessConfig()

NODES = record_key("net", "model", RecordKind.NODES)
LEASE = record_key("net", "model", RecordKind.LEASE)


class Shelves:
    """The DHT as one dictionary, each side of a cut with its own."""

    def __init__(self) -> None:
        self.values: dict[int, dict[str, dict[str, bytes]]] = {}
        self.searches: Counter[str] = Counter()


class Full:
    """One full peer."""

    def __init__(self, world: "World", given: list["Full"]) -> None:
        self.world = world
        self.side = 0
        identity = Identity(world.rng.randbytes(32))
        self.transport = world.network.transport(identity)
        self.guard = RecordGuard()
        self.records = SharedRecords(
            self.open,
            RecordSigner(identity),
            self.guard,
            {peer.peer_id: peer.transport.addresses for peer in given},
            world.rng,
            world.network.now,
            dht=self,
        )
        self.helper = RecordHelper(self.records)
        self.tasks: list[asyncio.Task[None]] = []

    @property
    def peer_id(self) -> str:
        return self.transport.peer_id

    async def open(self, peer_id: str, protocol: str, where: tuple[str, ...]) -> Stream:
        return await self.transport.open_stream(peer_id, protocol, addresses=where)

    async def start(self) -> None:
        await self.transport.serve(RECORDS_PROTOCOL, self.helper.serve)
        self.tasks = [
            asyncio.create_task(self.records.run()),
            asyncio.create_task(self.live()),
        ]

    async def live(self) -> None:
        """Announce every 15 s and read every second, as a peer does."""
        while True:
            await self.announce()
            for _ in range(15):
                await self.names()
                await self.records.get(LEASE, latest=False)
                await asyncio.sleep(1)

    async def announce(self) -> None:
        record = record_of(self.peer_id, addresses=self.transport.addresses)
        until_s = self.world.network.now() + 60
        await self.records.store(NODES, codec.encode(record), until_s)

    async def names(self) -> set[str]:
        return set(await self.records.get(NODES, latest=False))

    async def stop(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self.records.close()

    async def kill(self) -> None:
        await self.stop()
        self.world.network.kill(self.peer_id)

    # Its part of the DHT

    async def search(self, key: str) -> None:
        self.world.shelves.searches[self.peer_id] += 1
        await asyncio.sleep(0.05)
        for data in self.world.shelves.values.get(self.side, {}).get(key, {}).values():
            try:
                self.guard.admit(data, now_unix_s=self.world.network.now())
            except RecordError:
                continue

    async def put(self, record: SignedRecord, data: bytes) -> bool:
        await asyncio.sleep(0.05)
        under = self.world.shelves.values.setdefault(self.side, {}).setdefault(record.key, {})
        under[record.peer_id] = data
        return True


class World:
    """Full peers that entered one after the other through the first."""

    def __init__(self, count: int, seed: int = 1) -> None:
        self.rng = random.Random(seed)
        self.network = MemoryNetwork(self.rng, link=LinkModel(delay_s=0.02))
        self.shelves = Shelves()
        self.peers: list[Full] = []
        for _ in range(count):
            self.peers.append(Full(self, self.peers[:1]))

    async def start(self) -> None:
        for peer in self.peers:
            await peer.start()
            await asyncio.sleep(0.5)

    async def stop(self) -> None:
        await asyncio.gather(*(peer.stop() for peer in self.peers))

    @property
    def names(self) -> set[str]:
        return {peer.peer_id for peer in self.peers}

    async def agreed(self, limit_s: float) -> float:
        """Seconds until every peer knows of exactly all of them."""
        clock = asyncio.get_running_loop().time
        started_s = clock()
        while any([await peer.names() != self.names for peer in self.peers]):
            assert clock() - started_s < limit_s
            await asyncio.sleep(0.2)
        return clock() - started_s

    def asked(self) -> int:
        return sum(peer.helper.counters["reads"] for peer in self.peers) + sum(
            peer.helper.counters["stores"] for peer in self.peers
        )


def within(body: Callable[[], Awaitable[None]], limit_s: float = 2000.0) -> None:
    async def run() -> None:
        await body()

    run_virtual(run(), limit_s=limit_s)


def test_everybody_soon_knows_what_is_new_and_hardly_anybody_searches() -> None:
    async def body() -> None:
        world = World(24)
        await world.start()
        assert await world.agreed(15.0) < 10.0
        await asyncio.sleep(30)
        before = world.shelves.searches.total()
        author = world.peers[7]
        clock = asyncio.get_running_loop().time
        told_s = clock()
        assert await author.records.store(LEASE, b"a lease", world.network.now() + 30)
        assert clock() - told_s < 2.0
        aware = [author.peer_id in peer.records.known_signed(LEASE) for peer in world.peers]
        assert sum(aware) >= CONFIG.pushed_to
        while not all(author.peer_id in p.records.known_signed(LEASE) for p in world.peers):
            assert clock() - told_s < 10.0
            await asyncio.sleep(0.1)
        await asyncio.sleep(120)
        per_peer = (world.shelves.searches.total() - before) / len(world.peers)
        assert per_peer <= 130 / CONFIG.search_period_s + 1
        await world.stop()

    within(body)


def test_what_a_peer_does_hardly_grows_with_the_swarm() -> None:
    async def requests(count: int) -> float:
        """Requests per peer and second once all know each other."""
        world = World(count)
        await world.start()
        await world.agreed(30.0)
        before = world.asked()
        await asyncio.sleep(60)
        per_peer = (world.asked() - before) / count / 60
        await world.stop()
        return per_peer

    small = run_virtual(requests(12), limit_s=500)
    large = run_virtual(requests(48), limit_s=500)
    assert 0.5 < small < 1.5
    assert large < 1.1 * small


def test_a_newcomer_and_a_client_know_all_from_the_peer_they_enter_through() -> None:
    async def body() -> None:
        world = World(12)
        await world.start()
        await world.agreed(15.0)
        before = world.shelves.searches.total()
        for entry in world.peers[:4]:
            transport = world.network.transport()

            async def open_stream(
                peer_id: str, protocol: str, where: tuple[str, ...], me: object = transport
            ) -> Stream:
                return await me.open_stream(peer_id, protocol, addresses=where)  # type: ignore[attr-defined]

            client = AskedRecords(
                open_stream,
                RecordSigner(Identity(world.rng.randbytes(32))),
                RecordGuard(),
                {entry.peer_id: entry.transport.addresses},
                world.rng,
                world.network.now,
            )
            assert set(await client.get(NODES, latest=False)) == world.names
            world.network.freeze(entry.peer_id)  # it knows others by now
            assert set(await client.get(NODES, latest=True)) == world.names
            world.network.thaw(entry.peer_id)
            await client.close()
        assert world.shelves.searches.total() == before
        await world.stop()

    within(body)


@pytest.mark.parametrize("ahead_s", [-3600.0, -100.0, 100.0, 3600.0])
def test_a_client_whose_clock_is_wrong_sees_what_its_peers_see(ahead_s: float) -> None:
    async def body() -> None:
        world = World(3)
        await world.start()
        await world.agreed(15.0)
        transport = world.network.transport()
        client = AskedRecords(
            lambda peer, protocol, where: transport.open_stream(peer, protocol, addresses=where),
            RecordSigner(Identity(world.rng.randbytes(32))),
            RecordGuard(),
            {world.peers[0].peer_id: world.peers[0].transport.addresses},
            world.rng,
            lambda: world.network.now() + ahead_s,
        )
        assert set(await client.get(NODES, latest=False)) == world.names
        assert abs(client.clock.now() - world.network.now()) < 1
        way = "ahead of" if ahead_s > 0 else "behind"
        assert f"clock is {abs(ahead_s):.0f} s {way} its peers'" in client.clock.note
        await asyncio.sleep(60)  # a life of records later
        assert set(await client.get(NODES, latest=False)) == world.names
        await client.close()
        await world.stop()

    within(body)


def test_a_client_that_reads_many_models_at_once_is_told_of_all() -> None:
    """What was never asked for would look like models that nobody serves."""

    async def body() -> None:
        world = World(3)
        await world.start()
        keys = [record_key("net", f"model {number}", RecordKind.NODES) for number in range(30)]
        for number, key in enumerate(keys):
            author, until_s = world.peers[number % 3], world.network.now() + 60
            assert await author.records.store(key, b"here", until_s)
        transport = world.network.transport()
        client = AskedRecords(
            lambda peer, protocol, where: transport.open_stream(peer, protocol, addresses=where),
            RecordSigner(Identity(world.rng.randbytes(32))),
            RecordGuard(),
            {peer.peer_id: peer.transport.addresses for peer in world.peers},
            world.rng,
            world.network.now,
        )
        found = await asyncio.gather(*(client.get(key, latest=False) for key in keys))
        assert [len(under) for under in found] == [1] * len(keys)
        await client.close()
        await world.stop()

    within(body)


def test_a_client_that_slept_knows_what_time_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its event loop's clock stood still, by which it knows when helpers said what time it was."""

    async def body() -> None:
        wall_s, slept_s, clock_s = 1e9, 0.0, time.clock_gettime
        monkeypatch.setattr(
            time,
            "clock_gettime",
            lambda which: clock_s(which) + (slept_s if which == time.CLOCK_BOOTTIME else 0.0),
        )
        network = MemoryNetwork(random.Random(1))
        client = AskedRecords(
            lambda peer, protocol, where: network.transport().open_stream(peer, protocol),
            RecordSigner(Identity(b"c" * 32)),
            RecordGuard(),
            {},
            random.Random(1),
            lambda: wall_s,
        )
        for number in range(5):
            client.clock.heard(f"helper {number}", wall_s, f"203.0.{number}.1")
        wall_s, slept_s = wall_s + 3600.0, 3600.0
        client.clock.heard("helper 0", wall_s, "203.0.0.1")
        assert client.clock.now() == wall_s
        assert client.clock.note == ""

    within(body)


def test_the_dead_are_forgotten_and_a_swarm_that_was_cut_heals() -> None:
    async def body() -> None:
        world = World(10, seed=3)
        await world.start()
        await world.agreed(15.0)
        for victim in (world.peers[0], world.peers[4]):  # the one all entered through, and another
            await victim.kill()
            world.peers.remove(victim)
        await world.agreed(75.0)
        sides = world.peers[::2], world.peers[1::2]
        world.network.partition([p.peer_id for p in sides[0]], [p.peer_id for p in sides[1]])
        for peer in sides[1]:
            peer.side = 1
        await asyncio.sleep(200)
        assert await world.peers[0].names() == {peer.peer_id for peer in sides[0]}
        world.network.heal()
        for peer in world.peers:
            peer.side = 0
        assert await world.agreed(200.0) < 1.5 * CONFIG.search_period_s + 60
        await world.stop()

    within(body)


def test_liars_among_those_asked_hide_nothing_and_fill_nothing() -> None:
    async def body() -> None:
        world = World(12)
        invented = [Identity(bytes([200 + n]) * 32) for n in range(40)]

        async def lie(stream: Stream) -> None:
            """Give nothing but records that break a rule, and take what is told."""
            until_s = world.network.now() + 60
            forged = bytearray(sign_record(invented[0], NODES, b"forged!", until_s))
            forged[forged.index(b"forged!")] ^= 1
            elsewhere = [sign_record(i, "net/other/nodes", b"x", until_s) for i in invented]
            while True:
                message = (await codec.read_frame(stream)).message
                if isinstance(message, RecordStore):
                    await codec.send_frame(stream, RecordStored(taken=True))
                    continue
                found = RecordsFound(records=(bytes(forged), *elsewhere), more=True, unix_s=1.0)
                await codec.send_frame(stream, found)

        await world.start()
        for liar in world.peers[::3]:
            await liar.transport.serve(RECORDS_PROTOCOL, lie)
        honest = [peer for peer in world.peers if peer not in world.peers[::3]]
        clock = asyncio.get_running_loop().time
        started_s = clock()
        author = honest[0]
        await author.records.store(LEASE, b"a lease", world.network.now() + 30)
        while not all(author.peer_id in p.records.known_signed(LEASE) for p in honest):
            assert clock() - started_s < 20.0
            await asyncio.sleep(0.2)
        await asyncio.sleep(60)
        for peer in honest:
            assert {p.peer_id for p in honest} <= await peer.names() <= world.names
            assert len(peer.guard) <= 2 * len(world.peers)
        await world.stop()

    within(body)


def test_a_crowd_with_a_key_each_keeps_out_nothing_that_a_peer_reads_or_says() -> None:
    async def body() -> None:
        world = World(2)
        await world.start()
        full, other = world.peers
        full.guard.keys_max = len(full.guard._keys) + 4
        for number in range(100):
            eve = Identity(bytes([number]) * 32)
            stream = await world.network.transport(eve).open_stream(full.peer_id, RECORDS_PROTOCOL)
            data = sign_record(eve, f"eve/{number}/nodes", b"x", world.network.now() + 60)
            await codec.send_frame(stream, RecordStore(record=data, replicate=False))
            await codec.read_frame(stream)
        until_s = world.network.now() + 30
        await other.records.store(LEASE, b"a lease", until_s)
        await full.records.get(LEASE, latest=True)
        assert other.peer_id in full.records.known_signed(LEASE)
        plan = record_key("net", "model", RecordKind.PLAN)
        assert await full.records.store(plan, b"a plan", until_s)
        assert full.peer_id in full.records.known_signed(plan)
        await world.stop()

    within(body)


def test_only_its_own_records_are_taken_from_a_peer_and_only_so_many() -> None:
    async def body() -> None:
        world = World(2)
        await world.start()
        full = world.peers[0]
        eve, other = Identity(b"e" * 32), Identity(b"o" * 32)
        stream = await world.network.transport(eve).open_stream(full.peer_id, RECORDS_PROTOCOL)

        async def give(identity: Identity, number: int) -> object:
            until_s = world.network.now() + 60 + number / 1000
            data = sign_record(identity, NODES, b"%d" % number, until_s)
            await codec.send_frame(stream, RecordStore(record=data, replicate=False))
            return (await codec.read_frame(stream)).message

        refused = await give(other, 0)
        assert isinstance(refused, RecordStored)
        assert not refused.taken
        assert "is given as one of" in refused.reason
        taken = [await give(eve, number) for number in range(100)]
        assert sum(isinstance(answer, RecordStored) and answer.taken for answer in taken) <= 40
        assert other.peer_id not in full.records.known_signed(NODES)
        assert full.records.known_signed(NODES)[eve.peer_id].payload.isdigit()
        await world.stop()

    within(body)
