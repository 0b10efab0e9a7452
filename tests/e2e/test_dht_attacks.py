"""What stock DHT nodes let an attacker do, and that ours do not; real daemons on loopback."""

import asyncio
import contextlib
import math
import socket
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import psutil
import pytest

from coordinator.plans.reviewer import Reviewer
from coordinator.plans.store import PlanStore
from dht.budget import DHT_FIND_BYTES
from dht.daemon.transport import HivemindTransport
from dht.errors import NetworkError, UserError
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


async def test_a_plain_value_replaces_no_dictionary() -> None:
    now_s = time.time()
    async with stock_victim() as (attacker, storage):
        await attacker.store([b"alice"], [now_s + 60], ["alice"])
        assert await attacker.store([b"gone"], [now_s + 61], [None]) == [True]
        assert isinstance(storage.get(attacker.place(source=KEY)).value, bytes)
    async with our_victim() as (attacker, victim):
        assert await victim.store(KEY, b"alice", expires_unix_s=victim.now() + 60)
        assert await attacker.store([b"gone"], [now_s + 61], [None]) == [False]
        assert await victim.get(KEY) == {victim.peer_id: b"alice"}


async def test_expiries_that_never_come_pin_nothing() -> None:
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


async def test_an_older_record_pushes_no_newer_one_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def later(by_s: float) -> None:
        monkeypatch.setattr("hivemind.utils.timed_storage.get_dht_time", lambda: time.time() + by_s)

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


async def test_a_flood_keeps_nobody_out() -> None:
    flood, batch = 3000, 100

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


async def test_asking_costs_no_memory() -> None:
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
        burst = DHT_FIND_BYTES.burst + DHT_FIND_BYTES.per_s * (time.time() + 90 - expires_unix_s)
        assert sum(got) + whole <= burst, "a peer's rate"
        assert got[-1] < 1000
        joiner = await ours(victim)
        try:
            assert len(await joiner.get(KEY)) == records, "others are answered"
        finally:
            await joiner.close()


async def test_nobody_chooses_a_place_next_to_a_key() -> None:
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


async def test_forged_identities_nearest_to_the_plan_key_neither_hide_nor_forge_a_plan() -> None:
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
            store = PlanStore(peer, directory, review=Reviewer(peer, directory))
            for _ in range(8):
                await store.refresh()
                await asyncio.sleep(0.5)
            assert store.newest == good
            assert store.version not in heads
    finally:
        await asyncio.gather(*(p.close() for p in (*honest, *liars)))


@contextlib.asynccontextmanager
async def doors() -> AsyncIterator[tuple[int, list[object], socket.socket]]:
    """A TCP and a UDP port of this machine with one number: the number, who came, what came."""
    came: list[object] = []

    async def take(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        came.append(writer.get_extra_info("peername"))
        writer.close()

    server = await asyncio.start_server(take, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with socket.socket(type=socket.SOCK_DGRAM) as packets:
        packets.bind(("127.0.0.1", port))
        packets.setblocking(False)
        try:
            yield port, came, packets
        finally:
            server.close()


@pytest.mark.parametrize("public", [True, False])
async def test_a_stranger_s_addresses_are_dialled_only_where_they_may_be(public: bool) -> None:
    stranger = Identity.generate().peer_id
    victim = await HivemindTransport.create(
        TransportConfig(
            identity=Identity.generate(),
            host="127.0.0.1",
            announce_addresses=("/ip4/8.8.8.8/tcp/1",) if public else (),
        )
    )
    try:
        async with doors() as (port, came, packets):
            for address in (
                f"/ip4/127.0.0.1/udp/{port}/quic-v1",
                f"/dns4/localhost/tcp/{port}",
                f"/ip4/127.0.0.1/tcp/{port}/ws",
                f"/dns4/localhost/tcp/{port}/p2p/{victim.peer_id}/p2p-circuit",
            ):
                with pytest.raises(NetworkError, match="no address of it is known"):
                    await victim.open_stream(
                        stranger, "/test/1", addresses=(f"{address}/p2p/{stranger}",)
                    )
            assert not came
            with pytest.raises(NetworkError, match=stranger):
                await victim.open_stream(
                    stranger,
                    "/test/1",
                    addresses=(f"/ip4/127.0.0.1/tcp/{port}/p2p/{stranger}",),
                )
            assert bool(came) != public, "within one machine that is where others are"
            with pytest.raises(BlockingIOError):
                packets.recv(1 << 16)
    finally:
        await victim.close()


async def connected(peer: HivemindTransport, peer_id: str, *, wanted: bool) -> None:
    """Wait until a peer is connected to another, or is no more."""
    async with asyncio.timeout(10):
        while await peer._is_connected(peer_id) != wanted:  # noqa: ASYNC110  (the daemon tells none)
            await asyncio.sleep(0.05)


async def test_the_daemon_does_not_send_to_quic_addresses_that_peers_tell_it() -> None:
    """A peer tells the daemon of addresses when it connects; once it is gone, all are dialled."""
    from hivemind.p2p import P2P

    victim = await ours()
    try:
        async with doors() as (port, came, packets):
            evil = await P2P.create(
                initial_peers=[victim.addresses[0]],
                host_maddrs=["/ip4/127.0.0.1/tcp/0"],
                announce_maddrs=[
                    f"/ip4/127.0.0.1/tcp/{port}",
                    f"/ip4/127.0.0.1/udp/{port}/quic-v1",
                ],
            )
            evil_id = evil.peer_id.to_base58()
            at = (f"/ip4/127.0.0.1/tcp/{port}/p2p/{evil_id}",)
            await connected(victim, evil_id, wanted=True)
            # A stream is opened once the daemon knows what the other side is, and where.
            with pytest.raises(NetworkError, match="not supported"):
                await victim.open_stream(evil_id, "/test/1", addresses=at)
            await evil.shutdown()
            await connected(victim, evil_id, wanted=False)
            with pytest.raises(NetworkError, match="quic-v1"):
                await victim.open_stream(evil_id, "/test/1", addresses=at)
            assert came, "its TCP address was dialled"
            with pytest.raises(BlockingIOError):
                packets.recv(1 << 16)
    finally:
        await victim.close()


async def test_the_daemon_has_no_udp_port() -> None:
    victim = await ours()
    other = await ours(victim)
    try:
        for peer in (victim, other):
            assert all("/tcp/" in each for each in peer.addresses)
            daemon = psutil.Process(peer.daemon_pid)
            assert daemon.net_connections(kind="tcp")
            assert not daemon.net_connections(kind="udp")
    finally:
        await other.close()
        await victim.close()


@pytest.mark.parametrize("address", ["/ip4/127.0.0.1/udp/1/quic-v1", "/dns4/localhost/udp/1/quic"])
def test_nobody_listens_at_udp_or_joins_through_it(address: str) -> None:
    identity = Identity.generate()
    through = TransportConfig(
        identity=identity, initial_peers=(f"{address}/p2p/{Identity.generate().peer_id}",)
    )
    at = TransportConfig(identity=identity, host_addresses=(address,))
    announced = TransportConfig(identity=identity, announce_addresses=(address,))
    for config in (through, at, announced):
        with pytest.raises(UserError, match="/tcp"):
            asyncio.run(HivemindTransport.create(config))
