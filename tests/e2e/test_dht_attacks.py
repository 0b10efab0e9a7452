"""What stock DHT nodes let an attacker do, and that ours do not; real daemons on loopback."""

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from coordinator.plans.review import ReviewConfig
from coordinator.plans.reviewer import Reviewer
from coordinator.plans.store import PlanStore
from dht.budget import DHT_FIND_BYTES
from dht.daemon.transport import HivemindTransport
from dht.identity.peer_id import Identity
from dht.messages.types import PlanVersion
from dht.records.directory import Directory, RecordKind, record_key
from dht.records.signed import sign_record
from dht.transport.config import TransportConfig
from tests.unit.coordinator.conftest import Make

pytestmark = pytest.mark.e2e
KEY = "test/model/nodes"


async def ours(*peers: HivemindTransport, identity: Identity | None = None) -> HivemindTransport:
    return await HivemindTransport.create(
        TransportConfig(
            identity=identity or Identity.generate(),
            host="127.0.0.1",
            initial_peers=tuple(peer.addresses[0] for peer in peers),
        )
    )


class Attacker:
    """A stock node that stores whatever it likes at a victim."""

    def __init__(self, node: Any, victim: Any) -> None:
        from hivemind.dht.routing import DHTID

        self.node, self.victim = node, victim
        self.place = DHTID.generate

    async def store(
        self, values: list[bytes], expires_unix_s: list[float], subkeys: list[str | None]
    ) -> list[bool]:
        """Whether the victim took each of the values under ``KEY``."""
        from hivemind.utils import MSGPackSerializer

        stored = await self.node.protocol.call_store(
            self.victim,
            [self.place(source=KEY)] * len(values),
            [MSGPackSerializer.dumps(value) for value in values],
            expires_unix_s,
            subkeys=subkeys,
        )
        assert stored is not None, "the victim did not answer"
        return list(stored)


@contextlib.asynccontextmanager
async def stock_victim() -> AsyncIterator[tuple[Attacker, Any]]:
    """An attacker, and what a stock victim stores."""
    from hivemind.dht.node import DHTNode

    victim = await DHTNode.create(host_maddrs=["/ip4/127.0.0.1/tcp/0"])
    node = await DHTNode.create(
        host_maddrs=["/ip4/127.0.0.1/tcp/0"], initial_peers=await victim.get_visible_maddrs()
    )
    try:
        yield Attacker(node, victim.peer_id), victim.protocol.storage
    finally:
        await node.shutdown()
        await victim.shutdown()


@contextlib.asynccontextmanager
async def our_victim() -> AsyncIterator[tuple[Attacker, HivemindTransport]]:
    """An attacker, and one of our peers."""
    from hivemind.dht.node import DHTNode
    from hivemind.p2p import PeerID

    victim = await ours()
    node = await DHTNode.create(
        host_maddrs=["/ip4/127.0.0.1/tcp/0"], initial_peers=[victim.addresses[0]]
    )
    try:
        yield Attacker(node, PeerID.from_base58(victim.peer_id)), victim
    finally:
        await node.shutdown()
        await victim.close()


def test_a_plain_value_replaces_no_dictionary() -> None:
    async def body() -> None:
        now_s = time.time()
        async with stock_victim() as (attacker, storage):
            await attacker.store([b"alice"], [now_s + 60], ["alice"])
            assert await attacker.store([b"gone"], [now_s + 61], [None]) == [True]
            assert isinstance(storage.get(attacker.place(source=KEY)).value, bytes)
        async with our_victim() as (attacker, victim):
            assert await victim.store(KEY, b"alice", expires_unix_s=victim.now() + 60)
            assert await attacker.store([b"gone"], [now_s + 61], [None]) == [False]
            assert await victim.get(KEY) == {victim.peer_id: b"alice"}

    asyncio.run(body())


def test_expiries_that_never_come_pin_nothing() -> None:
    async def body() -> None:
        now_s = time.time()
        expiries = [math.inf, math.nan, now_s + 365 * 86400]
        mallory = Identity.generate()
        for expires_unix_s in expiries:
            async with stock_victim() as (attacker, storage):
                # Not-a-number only pins plain values: it is never later than anything.
                subkey = None if math.isnan(expires_unix_s) else "m"
                assert await attacker.store([b"pinned"], [expires_unix_s], [subkey]) == [True]
                assert attacker.place(source=KEY) in storage
        async with our_victim() as (attacker, victim):
            for expires_unix_s in expiries:
                # Signed as it should be, by the subkey's own peer: the expiry alone is wrong.
                data = sign_record(mallory, KEY, b"pinned", expires_unix_s)
                assert await attacker.store([data], [expires_unix_s], [mallory.peer_id]) == [False]
            # …and an honest signature does not cover a later expiry.
            data = sign_record(mallory, KEY, b"right", now_s + 60)
            assert await attacker.store([data], [now_s + 90], [mallory.peer_id]) == [False]
            assert await attacker.store([data], [now_s + 60], [mallory.peer_id]) == [True]
            assert await victim.get(KEY) == {mallory.peer_id: b"right"}

    asyncio.run(body())


def test_an_older_record_pushes_no_newer_one_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def later(by_s: float) -> None:
        monkeypatch.setattr("hivemind.utils.timed_storage.get_dht_time", lambda: time.time() + by_s)

    async def body() -> None:
        async with stock_victim() as (attacker, storage):
            soon_s = time.time() + 30
            await attacker.store([b"newer"], [soon_s + 60], ["alice"])
            await attacker.store([b"older"], [soon_s], ["alice"])
            later(31)
            assert "alice" not in storage.get(attacker.place(source=KEY)).value
            later(0)
        async with our_victim() as (attacker, victim):
            alice, soon_s = Identity.generate(), time.time() + 30
            older = sign_record(alice, KEY, b"older", soon_s)
            newer = sign_record(alice, KEY, b"newer", soon_s + 60)
            assert await attacker.store([newer], [soon_s + 60], [alice.peer_id]) == [True]
            assert await attacker.store([older], [soon_s], [alice.peer_id]) == [False]
            later(31)
            stored = victim._node.protocol.storage.get(attacker.place(source=KEY))
            assert alice.peer_id in stored.value
            assert await victim.get(KEY) == {alice.peer_id: b"newer"}

    asyncio.run(body())


def test_a_flood_keeps_nobody_out() -> None:
    flood, batch = 3000, 100

    async def body() -> None:
        expires_unix_s = time.time() + 90
        async with stock_victim() as (attacker, storage):
            for first in range(0, flood, batch):
                names: list[str | None] = [f"m{n}" for n in range(first, first + batch)]
                took = await attacker.store([b"x"] * batch, [expires_unix_s] * batch, names)
                assert all(took)
            assert len(storage.get(attacker.place(source=KEY)).value) == flood
        async with our_victim() as (attacker, victim):
            guard = victim._guard
            guard.authors_max = 500
            taken = 0
            for first in range(0, flood, batch):
                names, values = [], []
                for number in range(first, first + batch):
                    fake = Identity(number.to_bytes(32, "big"))
                    names.append(fake.peer_id)
                    values.append(sign_record(fake, KEY, b"x", expires_unix_s))
                taken += sum(await attacker.store(values, [expires_unix_s] * batch, names))
            assert taken < flood, "the rate of one storing peer is limited"
            assert len(guard) == 500, "the key is full"
            joiner = await ours(victim)
            try:
                assert await joiner.store(KEY, b"me", expires_unix_s=joiner.now() + 60)
                assert joiner.peer_id in await victim.get(KEY)
            finally:
                await joiner.close()
            assert len(guard) <= 500
            kept = victim._node.protocol.storage.get(attacker.place(source=KEY)).value
            assert len(kept) <= 500, "what gave way is gone from the node as well"

    asyncio.run(body())


def test_asking_costs_no_memory() -> None:
    records, times = 300, 60

    async def ask(attacker: Attacker, *keys: Any) -> int:
        """Bytes that one request brings."""
        from hivemind.proto import dht_pb2

        protocol = attacker.node.protocol
        request = dht_pb2.FindRequest(
            keys=[key.to_bytes() for key in keys], peer=protocol.node_info
        )
        answer = await protocol.get_stub(attacker.victim).rpc_find(request, timeout=20)
        return int(answer.ByteSize())

    async def body() -> None:
        expires_unix_s = time.time() + 90
        async with our_victim() as (attacker, victim):
            names: list[str | None] = []
            values = []
            for number in range(records):
                fake = Identity(number.to_bytes(32, "big"))
                names.append(fake.peer_id)
                values.append(sign_record(fake, KEY, b"x" * 4000, expires_unix_s))
            for first in range(0, records, 100):
                some = slice(first, first + 100)
                assert all(await attacker.store(values[some], [expires_unix_s] * 100, names[some]))
            key = attacker.place(source=KEY)
            whole = await ask(attacker, key)
            assert whole > records * 4000
            assert await ask(attacker, *[key] * times) < 1000, "the same key again and again"
            many = [attacker.place(source=f"{KEY}{n}") for n in range(times)]
            assert await ask(attacker, *many) < 1000, "more keys than a peer of ours asks for"
            got = [await ask(attacker, key) for _ in range(times)]
            burst = DHT_FIND_BYTES.burst + DHT_FIND_BYTES.per_s * (
                time.time() + 90 - expires_unix_s
            )
            assert sum(got) + whole <= burst, "a peer's rate"
            assert got[-1] < 1000
            joiner = await ours(victim)
            try:
                assert len(await joiner.get(KEY)) == records, "others are answered"
            finally:
                await joiner.close()

    asyncio.run(body())


def test_nobody_chooses_a_place_next_to_a_key() -> None:
    async def body() -> None:
        from hivemind.dht.node import DHTNode

        async with stock_victim() as (attacker, _):
            near = attacker.place(source=KEY)
            chosen = await DHTNode.create(
                node_id=near,
                host_maddrs=["/ip4/127.0.0.1/tcp/0"],
                initial_peers=await attacker.node.get_visible_maddrs(),
            )
            assert near in attacker.node.protocol.routing_table
            await chosen.shutdown()
        async with our_victim() as (attacker, victim):
            protocol = victim._node.protocol
            near = attacker.place(source=KEY)
            chosen = await DHTNode.create(
                node_id=near,
                host_maddrs=["/ip4/127.0.0.1/tcp/0"],
                initial_peers=[victim.addresses[0]],
            )
            assert near not in protocol.routing_table
            assert protocol.misplaced > 0
            await chosen.shutdown()

    asyncio.run(body())


def nearest_identities(key: str, count: int, tries: int = 600) -> list[Identity]:
    """What an attacker gets by drawing keys until some happen to lie close."""
    from hivemind.dht.routing import DHTID
    from hivemind.p2p import PeerID

    from dht.daemon.kademlia import node_id_of

    place = DHTID.generate(source=key)
    drawn = [Identity(number.to_bytes(32, "big")) for number in range(tries)]
    return sorted(
        drawn,
        key=lambda i: place.xor_distance(node_id_of(PeerID.from_base58(i.peer_id))),
    )[:count]


def test_forged_identities_nearest_to_the_plan_key_neither_hide_nor_forge_a_plan() -> None:
    async def body() -> None:
        plan_key = record_key("net", Make.model.key, RecordKind.PLAN)
        founder = await ours()
        liars = [await ours(founder, identity=i) for i in nearest_identities(plan_key, 5)]
        honest = [founder, *[await ours(founder) for _ in range(3)]]
        try:
            author = honest[1]
            directories = {p.peer_id: Directory(p, "net", Make.model.key) for p in honest}
            for peer in honest:
                record = Make.record(peer.peer_id, memory=1000)
                await directories[peer.peer_id].publish(
                    replace(record, joined_unix_s=peer.now() - 1000)
                )
            spans = [Make.span(peer.peer_id, 0, 8) for peer in honest]
            edges = []
            for peer in honest:
                edges += [
                    Make.edge("source", peer.peer_id, 12.0),
                    Make.edge(peer.peer_id, "sink", 12.0),
                ]
            good = replace(Make.plan(spans, edges), coordinator=author.peer_id)
            # The liars lie nearest to the key, answer that they know of nothing, and each
            # publishes a later plan that gives everything to itself.
            heads = []
            for number, liar in enumerate(liars):
                liar._node.protocol.storage.store_subkey = lambda *_: True
                store = PlanStore(liar, Directory(liar, "net", Make.model.key))
                await store.serve()
                forged = Make.plan(
                    [Make.span(liar.peer_id, 0, 8)],
                    [
                        Make.edge("source", liar.peer_id, 1e4),
                        Make.edge(liar.peer_id, "sink", 1e4),
                    ],
                    version=PlanVersion(term=100 + number),
                )
                forged = replace(forged, coordinator=liar.peer_id)
                heads.append(forged.version)
                head = await store.add(forged)
                await Directory(liar, "net", Make.model.key).publish(head)
            source = PlanStore(author, directories[author.peer_id])
            await source.serve()
            assert await directories[author.peer_id].publish(await source.add(good))
            for peer in (honest[0], *honest[2:]):
                directory = directories[peer.peer_id]
                store = PlanStore(peer, directory, review=Reviewer(peer, directory, ReviewConfig()))
                for _ in range(8):
                    await store.refresh()
                    await asyncio.sleep(0.5)
                assert store.newest == good
                assert store.version not in heads
        finally:
            await asyncio.gather(*(p.close() for p in (*honest, *liars)))

    asyncio.run(body())
