"""A client's view beside strangers who publish plans, on the in-memory network."""

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from client.errors import UnavailableError
from client.view.reader import ReaderConfig, SwarmReader
from client.view.view import SwarmView, ViewConfig
from coordinator.plans.store import PlanStore
from coordinator.plans.versions import rank
from coordinator.policies.routing.routes import NoRoute
from coordinator.problem.model_pin import ModelPin
from dht.identity.peer_id import Identity
from dht.messages.session import RefusalCode
from dht.messages.types import FlowEdge, ModelRecord, NodeRecord, Plan, PlanVersion
from dht.records.directory import Directory
from dht.transport.interface import PLAN_PROTOCOL, Stream
from testing.clock import run_virtual
from testing.network import MemoryNetwork, MemoryTransport
from tests.unit.coordinator.conftest import Make

NEVER_S = 3600.0


class Told:
    """A peer that serves all layers at 100 tokens/s, announces that and may publish plans."""

    def __init__(self, network: MemoryNetwork) -> None:
        self.transport: MemoryTransport = network.transport()
        self.directory = Directory(self.transport, "net", Make.model.key)
        self.store = PlanStore(self.transport, self.directory)
        self.record: NodeRecord = Make.record(self.me, 0, 8, rate=800.0)

    @property
    def me(self) -> str:
        return self.transport.peer_id

    async def announce(self) -> None:
        await self.directory.publish(self.record)

    def plan(self, term: int, flows: dict[str, float]) -> Plan:
        """A plan of its own that gives every peer of ``flows`` all layers."""
        edges: list[FlowEdge] = []
        for peer, flow in flows.items():
            edges += [
                FlowEdge(tail="source", head=peer, tokens_per_s=flow),
                FlowEdge(tail=peer, head="sink", tokens_per_s=flow),
            ]
        spans = [Make.span(peer, 0, 8) for peer in flows]
        version = PlanVersion(term=term, counter=1, rank=rank(self.me, term))
        return replace(Make.plan(spans, edges, version=version), coordinator=self.me)

    async def publish(self, plan: Plan, followers: list["Told"]) -> None:
        await self.directory.publish(await self.store.add(plan))
        for follower in followers:
            follower.record = replace(follower.record, plan_version=plan.version)
            await follower.announce()


class World:
    def __init__(self, reader: SwarmReader, honest: list[Told], strangers: list[Told]) -> None:
        self.reader = reader
        self.honest = honest
        self.strangers = strangers

    def drawn(self, count: int = 60) -> Counter[str]:
        """The peers of ``count`` new routes, each of one stage."""
        routes = [self.reader.view.draw((), frozenset(), 1, 0.0) for _ in range(count)]
        assert not any(isinstance(route, NoRoute) for route in routes)
        return Counter(route[0].peer_id for route in routes if not isinstance(route, NoRoute))

    def of(self, peers: list[Told], count: int = 60) -> int:
        """How many of ``count`` routes go over ``peers``."""
        drawn = self.drawn(count)
        return sum(drawn[peer.me] for peer in peers)


def near(drawn: int, share: int) -> bool:
    """Whether a peer had its share of 60 to 80 draws, but for what turns of two wheels leave."""
    return abs(drawn - share) < 4


def in_a_swarm(body: Callable[[World], Awaitable[None]]) -> None:
    """``body`` beside a client, two honest peers under a plan that uses both alike, and a third."""

    async def run() -> None:
        network = MemoryNetwork(random.Random(1))
        peers = [Told(network) for _ in range(6)]
        honest, strangers = peers[:2], peers[2:]
        for peer in peers:
            await peer.store.serve()
        await honest[0].publish(honest[0].plan(5, {p.me: 50.0 for p in honest}), honest)
        config = ReaderConfig(network="net")
        reader = SwarmReader(network.transport(), Make.model.name, config, lambda text: None)
        async with reader.reading():
            await asyncio.sleep(5.0)
            await body(World(reader, honest, strangers))

    run_virtual(run(), limit_s=5000)


def test_routes_follow_the_plan_that_the_peers_follow():
    async def body(world: World) -> None:
        drawn = world.drawn()
        assert all(near(drawn[peer.me], 30) for peer in world.honest)
        plan = world.reader.view.plan
        assert plan is not None
        assert plan.coordinator == world.honest[0].me

    in_a_swarm(body)


def test_a_request_alone_goes_over_the_quickest_and_many_go_in_turn():
    """One of two honest peers decodes three times as quickly, for as many sessions."""

    async def body(world: World) -> None:
        for peer, layer_ns in zip(world.honest, (1_000_000, 3_000_000), strict=True):
            times = ((1, layer_ns, layer_ns), (4, 4 * layer_ns, 4 * layer_ns))
            peer.record = replace(peer.record, decode_layer_ns=times)
            await peer.announce()
        await asyncio.sleep(5.0)
        quick, slow = world.honest
        assert world.drawn() == {quick.me: 60}
        for number in range(8):
            route = world.reader.view.draw((), frozenset(), 1, 0.0)
            assert not isinstance(route, NoRoute)
            world.reader.view.goes_over(str(number), route)
        drawn = world.drawn()
        assert near(drawn[quick.me], 30), "now it has enough to do"
        assert near(drawn[slow.me], 30)

    in_a_swarm(body)


def test_who_announces_short_times_and_does_not_keep_them_gets_its_turns_alone():
    async def body(world: World) -> None:
        liar, honest = world.honest
        for peer, layer_ns in ((liar, 1), (honest, 3_000_000)):
            peer.record = replace(peer.record, decode_layer_ns=((1, layer_ns, layer_ns),))
            await peer.announce()
        await asyncio.sleep(5.0)
        view = world.reader.view
        assert world.drawn() == {liar.me: 60}
        route = view.draw((), frozenset(), 1, 0.0)
        assert not isinstance(route, NoRoute)
        expected_s = view.goes_over("one", route)
        view.own.ends("one")
        view.took(route, expected_s, 0.4, 0.0)
        drawn = world.drawn()
        assert near(drawn[liar.me], 30)
        view.took(route, expected_s, 0.02, 0.0)
        assert world.drawn() == {liar.me: 60}, "on time again"
        view.avoid(liar.me, RefusalCode.NO_KV, 1.0, 0.0)
        view.answered([liar.me], had_room=True)
        assert near(world.drawn()[liar.me], 30), "who refused is asked in turn alone"

    in_a_swarm(body)


def test_what_a_peer_announced_when_it_was_chosen_is_what_it_must_keep():
    """It says that a second session slows it a lot, and later that it has some."""

    async def body(world: World) -> None:
        liar, honest = world.honest
        steep = ((1, 1, 1), (2, 10_000_000_000, 10_000_000_000))
        for peer, times in ((liar, steep), (honest, ((1, 3_000_000, 3_000_000),))):
            peer.record = replace(peer.record, decode_layer_ns=times)
            await peer.announce()
        await asyncio.sleep(5.0)
        view = world.reader.view
        assert world.drawn() == {liar.me: 60}
        route = view.draw((), frozenset(), 1, 0.0)
        assert not isinstance(route, NoRoute)
        expected_s = view.goes_over("one", route)
        liar.record = replace(liar.record, sessions=1)
        await liar.announce()
        await asyncio.sleep(5.0)
        view.took(route, expected_s, 0.4, 0.0)
        view.own.ends("one")
        liar.record = replace(liar.record, sessions=0)
        await liar.announce()
        await asyncio.sleep(5.0)
        assert near(world.drawn()[liar.me], 30)

    in_a_swarm(body)


def test_a_plan_that_nobody_follows_moves_no_route():
    """A stranger publishes a later plan; nobody that serves says that it follows it."""

    async def body(world: World) -> None:
        stranger = world.strangers[0]
        await stranger.announce()
        mine = {stranger.me: 1e6, world.honest[0].me: 1e-3}
        await stranger.publish(stranger.plan(9, mine), [])
        for _ in range(80):
            await asyncio.sleep(10.0)
            for peer in (*world.honest, stranger):
                await peer.announce()
        drawn = world.drawn(80)
        assert all(near(drawn[peer.me], 20) for peer in world.honest)
        assert near(drawn[stranger.me], 40), "what it announces, no more"

    in_a_swarm(body)


def test_a_plan_that_strangers_follow_moves_routes_over_these_alone():
    """It takes what its followers could have by announcing the same without it: half."""

    async def body(world: World) -> None:
        strangers = world.strangers[:1]
        plan = strangers[0].plan(9, {strangers[0].me: 1e9, world.honest[0].me: 1e9})
        await strangers[0].publish(plan, strangers)
        await asyncio.sleep(10.0)
        drawn = world.drawn(60)
        assert near(drawn[strangers[0].me], 30)
        assert all(near(drawn[peer.me], 15) for peer in world.honest)

    in_a_swarm(body)


def test_names_that_follow_a_plan_count_nothing_by_their_number():
    """They announce that they can do nothing, in fifty plans: the routes of the others stay."""

    async def body(world: World) -> None:
        for term in range(10, 60):
            stranger = world.strangers[term % 4]
            stranger.record = replace(stranger.record, tokens_per_s=(0.0,) * 8)
            await stranger.publish(stranger.plan(term, {stranger.me: 1e9}), [stranger])
            await asyncio.sleep(2.5)
            for peer in world.honest:
                await peer.announce()
        assert world.of(world.strangers) == 0
        assert world.of(world.honest[:1]) == 30

    in_a_swarm(body)


def test_a_plan_in_the_version_of_another_is_not_taken_for_it():
    async def body(world: World) -> None:
        stranger = world.strangers[0]
        await stranger.announce()
        version = world.honest[0].record.plan_version
        stolen = replace(stranger.plan(5, {world.honest[1].me: 1e-3}), version=version)
        await stranger.publish(stolen, [])
        newcomer = SwarmReader(
            world.strangers[1].transport,
            Make.model.name,
            ReaderConfig(network="net"),
            lambda text: None,
        )
        async with newcomer.reading():
            await asyncio.sleep(30.0)
            plan = newcomer.view.plan
            assert plan is not None
            assert plan.coordinator == world.honest[0].me

    in_a_swarm(body)


def test_a_holder_that_never_answers_does_not_keep_records_from_being_read():
    async def body(world: World) -> None:
        async def silence(stream: Stream) -> None:
            await asyncio.sleep(NEVER_S)

        for stranger in world.strangers:
            await stranger.transport.serve(PLAN_PROTOCOL, silence)
            await stranger.publish(stranger.plan(9, {stranger.me: 1.0}), [stranger])
        await asyncio.sleep(3.0)
        for start in (1, 2, 3):
            world.honest[0].record = replace(world.honest[0].record, start=start)
            await world.honest[0].announce()
            await asyncio.sleep(2.5)
            assert world.reader.view.nodes[world.honest[0].me].start == start

    in_a_swarm(body)


def test_absurd_records_neither_raise_nor_take_routes():
    """Whatever the wire allows in spans, rates and addresses."""
    rng = random.Random(3)
    rates = (0.0, 5e-324, 1e-300, 1.0, 1e15)
    for _ in range(300):
        view = SwarmView(ViewConfig(avoid_s=1.0))
        nodes = {"honest": Make.record("honest", 0, 8)}
        for number in range(rng.randrange(8)):
            name = f"absurd {number}"
            nodes[name] = replace(
                Make.record(name, 0, 1),
                start=rng.choice((0, 1, 7, 8, 1024)),
                end=rng.choice((0, 1, 7, 8, 9, 1024)),
                tokens_per_s=(rng.choice(rates),) * rng.choice((0, 1, 8, 1024)),
                kv_tokens_free=rng.choice((0, 1 << 50)),
                joined_unix_s=rng.choice((0.0, 1e10)),
                addresses=("\x00", "/dns4/" + "a" * 200),
                plan_version=PlanVersion(term=rng.choice((0, 1, 1 << 48))),
            )
        view.take_nodes(nodes)
        for _ in range(3):
            route = view.draw((), frozenset(), 10, 0.0)
            assert not isinstance(route, NoRoute)
            assert route[-1].end == 8
            assert view.plan is None
            view.draw(route, frozenset([route[0].peer_id]), 10, 0.0)
            view.swap(route, route[0].peer_id, "absurd 0", 10, 0.0)
        view.answering_route(0.0)


def test_new_routes_go_by_freeness_among_those_that_the_plan_allows():
    async def body(world: World) -> None:
        free, busy = world.honest
        free.record = replace(free.record, kv_tokens_free=100_000, sessions=5)
        busy.record = replace(busy.record, kv_tokens_free=100_000, sessions=45)
        for peer in world.honest:
            await peer.announce()
        await asyncio.sleep(5.0)
        drawn = world.drawn(80)
        assert near(drawn[free.me], 60), "both looks fall on the busy one in a quarter of the turns"
        assert near(drawn[busy.me], 20)

    in_a_swarm(body)


class BehindTransport(MemoryTransport):
    """A transport on a machine whose clock is wrong."""

    clock_note = "this machine's clock is 100 s behind its peers': set it"  # type: ignore[assignment]


@pytest.mark.virtual(limit_s=30)
async def test_a_wrong_clock_is_told_once_and_in_the_answer() -> None:
    network = MemoryNetwork(random.Random(1))
    told: list[str] = []
    transport = BehindTransport(network, Identity.generate())
    config = ReaderConfig(network="net", wait_s=1.0)
    reader = SwarmReader(transport, Make.model.name, config, told.append)
    async with reader.reading():
        with pytest.raises(UnavailableError, match="; this machine's clock is 100 s"):
            await reader.ready_spec()
    assert sum("until then theirs counts" in line for line in told) == 1


@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.virtual(limit_s=30)
async def test_who_must_say_which_weights_are_meant_hears_so_soon(pinned: bool) -> None:
    network = MemoryNetwork(random.Random(1))
    for root in ("ab" * 32, "cd" * 32):
        peer = Told(network)
        model = replace(Make.model, root=root)
        peer.record = replace(peer.record, model=model)
        await peer.announce()
    pin = ModelPin(fingerprint="ef" * 32 if pinned else "")
    loop = asyncio.get_running_loop()
    config = ReaderConfig(network="net", wait_s=60.0)
    reader = SwarmReader(network.transport(), Make.model.name, config, lambda line: None, pin=pin)
    async with reader.reading():
        began_s = loop.time()
        with pytest.raises(UnavailableError, match="--fingerprint"):
            await reader.ready_spec()
        assert loop.time() - began_s < 3.0


def test_who_asks_for_a_model_that_nobody_has_hears_at_once_what_there_is() -> None:
    async def scenario() -> None:
        network = MemoryNetwork(random.Random(1))
        peer = Told(network)
        await peer.announce()
        told = ModelRecord(peer_id=peer.me, model=Make.model, precision="float32")
        await Directory.of_models(peer.transport, "net").publish(told)
        loop = asyncio.get_running_loop()
        config = ReaderConfig(network="net", wait_s=60.0)
        reader = SwarmReader(network.transport(), "llama", config, lambda line: None)
        async with reader.reading():
            began_s = loop.time()
            with pytest.raises(
                UnavailableError, match=f"announces llama; it serves {Make.model.name}: "
            ):
                await reader.ready_spec()
            assert loop.time() - began_s < 3.0
            assert (await own_reader(network).ready_spec()).name == Make.model.name

    def own_reader(network: MemoryNetwork) -> SwarmReader:
        config = ReaderConfig(network="net", wait_s=60.0)
        return SwarmReader(network.transport(), Make.model.name, config, lambda line: None)

    run_virtual(scenario(), limit_s=90)
