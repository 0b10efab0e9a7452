"""Which peers relay for one that others cannot reach, and how the two are told of."""

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from dht.identity.peer_id import Identity
from dht.messages import codec
from dht.messages.peer import ReachAnswer, ReachRequest
from dht.messages.types import NodeRecord, Reach
from dht.records.directory import Directory
from dht.transport.interface import REACH_PROTOCOL, Stream
from dht.transport.relay_reservation import RELAY_PROTOCOL, RESERVE
from node.links.reachability import ReachKeeper
from node.links.relay_slots import RelayConfig, Relays, relay_candidates
from testing.network import MemoryNetwork, MemoryTransport
from tests.sim.test_sessions import until
from tests.unit.records import MODEL, record_of

CONFIG = RelayConfig()

GRANTED = b"\x04\x08\x02\x28\x64"
REFUSED = b"\x05\x08\x02\x28\xc8\x01"
ROUTER = "8.8.4.4"


class Other:
    """A peer that may relay, and dials back."""

    def __init__(self, network: MemoryNetwork, number: int) -> None:
        self.transport: MemoryTransport = network.transport()
        self.grants, self.asked = True, 0
        self.reaches: bool | None = False
        me = self.transport.peer_id
        at = f"/ip4/1.2.3.{number}/tcp/5/p2p/{me}"
        self.record: NodeRecord = replace(
            record_of(me, 0, 2), reach=Reach.DIRECT, relays=True, addresses=(at,)
        )

    async def start(self) -> None:
        await self.transport.serve(RELAY_PROTOCOL, self._relay)
        await self.transport.serve(REACH_PROTOCOL, self._dial_back)
        await Directory(self.transport, "net", MODEL.key).publish(self.record)

    async def _relay(self, stream: Stream) -> None:
        self.asked += 1
        await stream.read_exactly(len(RESERVE))
        stream.write(GRANTED if self.grants else REFUSED)
        await stream.drain()

    async def _dial_back(self, stream: Stream) -> None:
        request = (await codec.read_frame(stream)).message
        assert request == ReachRequest(port=31337)
        await codec.send_frame(stream, ReachAnswer(reached=self.reaches, host=ROUTER))


def others(network: MemoryNetwork, count: int) -> dict[str, Other]:
    made = [Other(network, number) for number in range(count)]
    return {each.transport.peer_id: each for each in made}


def records(peers: dict[str, Other]) -> dict[str, NodeRecord]:
    return {peer_id: each.record for peer_id, each in peers.items()}


def test_only_peers_that_offer_it_and_that_others_reach_relay() -> None:
    network = MemoryNetwork(random.Random(1))
    peers = records(others(network, 5))
    me, none, counts, local, good = peers
    peers[none] = replace(peers[none], reach=Reach.NONE)
    peers[counts] = replace(peers[counts], relays=False)
    peers[local] = replace(peers[local], addresses=(f"/ip4/127.0.0.1/tcp/5/p2p/{local}",))
    assert relay_candidates(peers, me) == [good]


def test_not_everybody_takes_the_same_relays() -> None:
    peers = records(others(MemoryNetwork(random.Random(1)), 12))
    assert len({relay_candidates(peers, f"peer{n}")[0] for n in range(40)}) > 6


@pytest.mark.virtual(limit_s=600)
async def test_slots_are_renewed_replaced_and_let_go() -> None:
    network = MemoryNetwork(random.Random(1))
    peers = others(network, 4)
    for each in peers.values():
        await each.start()
    relays = Relays(network.transport())
    await relays.hold(records(peers))
    held = {p for p, each in peers.items() if each.asked}
    assert len(held) == len(relays.addresses) == CONFIG.relays
    first = sorted(held)[0]
    before = relays.addresses
    peers[first].grants = False
    for _ in range(CONFIG.misses_max - 1):
        await relays.hold(records(peers))
        assert relays.addresses == before, "one miss is none"
    await relays.hold(records(peers))
    assert len(relays.addresses) == CONFIG.relays
    assert not any(f"/p2p/{first}/" in each for each in relays.addresses)
    # One that others cannot reach any more is of no use though it grants.
    second = next(iter(held - {first}))
    peers[second].record = replace(peers[second].record, reach=Reach.NONE)
    for _ in range(CONFIG.misses_max):
        await relays.hold(records(peers))
    assert not any(f"/p2p/{second}/" in each for each in relays.addresses)
    relays.let_go()
    assert relays.addresses == ()


@pytest.mark.virtual(limit_s=600)
async def test_who_refuses_does_not_keep_others_from_being_asked() -> None:
    network = MemoryNetwork(random.Random(1))
    peers = others(network, 9)
    for each in peers.values():
        await each.start()
    transport = network.transport()
    good = relay_candidates(records(peers), transport.peer_id)[-1]
    for peer_id, each in peers.items():
        each.grants = peer_id == good
    relays = Relays(transport)
    for _ in range(3):
        await relays.hold(records(peers))
    assert [good in each for each in relays.addresses] == [True]


class Listening(MemoryTransport):
    """Behind a router: it knows only its address in the local network."""

    host = "192.168.1.5"

    @property
    def addresses(self) -> tuple[str, ...]:
        return (f"/ip4/{self.host}/tcp/31337/p2p/{self.peer_id}",)


Told = list[tuple[Reach, tuple[str, ...]]]


async def keeper(
    network: MemoryNetwork, prepare: Callable[[list[Other]], None]
) -> tuple[ReachKeeper, Told, list[Other], str]:
    peers = list(others(network, 3).values())
    prepare(peers)
    for each in peers:
        await each.start()
    identity = Identity(network.rng.randbytes(32))
    transport = network.peers[identity.peer_id] = Listening(network, identity)
    told: Told = []
    directory = Directory(transport, "net", MODEL.key)
    made = ReachKeeper(
        transport,
        directory,
        lambda reach, beside: told.append((reach, beside)),
        relays=Relays(transport),
    )
    return made, told, peers, transport.peer_id


@pytest.mark.virtual(limit_s=600)
async def test_a_closed_peer_takes_relays_and_leaves_them_when_it_is_open() -> None:
    def nothing(peers: list[Other]) -> None:
        pass

    network = MemoryNetwork(random.Random(1))
    kept, told, peers, me = await keeper(network, nothing)
    await kept.look()
    assert kept.settled.is_set()
    (reach, beside), *rest = told
    assert (reach, rest, len(beside)) == (Reach.RELAYED, [], CONFIG.relays)
    assert all(each.endswith(f"/p2p-circuit/p2p/{me}") for each in beside)
    await kept.look()
    assert len(told) == 1, "nothing changed"
    for each in peers:
        each.reaches = True
    await kept.look()
    # The router's address, which others dialled, is told on: the peer does not see it itself.
    assert told[1:] == [(Reach.DIRECT, (f"/ip4/{ROUTER}/tcp/31337/p2p/{me}",))]


@pytest.mark.virtual(limit_s=2000)
async def test_a_peer_in_another_network_is_dialled_back_there_at_once() -> None:
    def reach(peers: list[Other]) -> None:
        for each in peers:
            each.reaches = True

    network = MemoryNetwork(random.Random(1))
    kept, told, peers, me = await keeper(network, reach)
    running, clock = asyncio.create_task(kept.run()), asyncio.get_running_loop()
    await until(lambda: bool(told))
    assert [reach for reach, _ in told] == [Reach.DIRECT]
    for each in peers:
        each.reaches = False
    moved, moved_s = network.peers[me], clock.time()
    assert isinstance(moved, Listening)
    moved.host = "172.16.0.9"
    await until(lambda: told[-1][0] is Reach.RELAYED)
    assert clock.time() - moved_s < 60
    running.cancel()


@pytest.mark.virtual(limit_s=600)
async def test_a_relay_that_dies_is_replaced_within_fifteen_seconds() -> None:
    def nothing(peers: list[Other]) -> None:
        pass

    network = MemoryNetwork(random.Random(1))
    kept, told, peers, _ = await keeper(network, nothing)
    running = asyncio.create_task(kept.run())
    clock = asyncio.get_running_loop()
    await until(lambda: bool(told))
    (_, beside), held = told[0], [each for each in peers if each.asked]
    assert len(held) == CONFIG.relays
    dead = held[0].transport.peer_id
    await asyncio.sleep(10)
    assert len(told) == 1, "who is there stays"
    died_s = clock.time()
    network.kill(dead)
    await until(lambda: len(told) > 1)
    assert clock.time() - died_s < 15
    reach, now = told[1]
    assert reach is Reach.RELAYED
    assert len(now) == CONFIG.relays
    assert not any(f"/p2p/{dead}/" in each for each in now)
    assert set(now) & set(beside), "the other one stays"
    running.cancel()


@pytest.mark.virtual(limit_s=600)
async def test_without_a_relay_it_says_that_nobody_reaches_it() -> None:
    def refuse(peers: list[Other]) -> None:
        for each in peers:
            each.grants = False

    kept, told, _, _ = await keeper(MemoryNetwork(random.Random(1)), refuse)
    await kept.look()
    assert told == [(Reach.NONE, ())]
