"""Nobody coordinates: the last plan serves on, and peers that join take the layers that need it.

Real peers (shell, coordinator, stage, plan store, links) and real clients under a virtual clock.
Only one peer may coordinate here, and it dies.
"""

import asyncio
import io
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

import pytest

from coordinator.evaluation.plan_check import check_shape
from coordinator.plans.store import PlanStore
from coordinator.plans.transition import replication
from coordinator.runtime import Coordinator, CoordinatorConfig
from dht.errors import MachineError, NetworkError, UserError
from dht.identity.peer_id import Identity
from dht.messages.types import SINK, SOURCE, Assignment, DeviceSpec, FlowEdge, NodeRecord, NodeState
from dht.process.supervision import Supervisor
from dht.records.directory import Directory
from node.engine.worker import WorkerTimes
from node.links.hops import HopConfig
from node.links.lent_traffic import LentTraffic
from node.links.probe import MeasuredLinks
from node.owner.idle_policy import Seen, UseConfig
from node.owner.machine_watch import MachineWatch
from node.owner.reporter import Reporter
from node.peer.peer import Peer, PeerConfig
from node.peer.plan_follower import PeerCore
from node.stage.server import StageConfig, StageServer
from testing.network import MemoryNetwork, MemoryTransport
from tests.sim.paper_swarm import LAYERS, NETWORK, SPEC, PaperEngine, PaperSwarm, answer_of
from tests.unit.coordinator.test_runtime import solve_here

pytestmark = pytest.mark.sim

NEW = 150
PROMPT = tuple(range(20))
KV_TOKENS_MIN = 256
LAYER_BYTES = 1 + KV_TOKENS_MIN
SETTLE_S = 60.0
HELP_S = 60.0
"""Time that joiners wait for a coordinator before they help themselves."""


class LoadingEngine(PaperEngine):
    """Takes layers when it is told to, which takes a while."""

    times = WorkerTimes()
    is_local = False

    def __init__(self, peer_id: str, memory_bytes: int = 1 << 30) -> None:
        super().__init__(peer_id, 0, 0, kv_tokens=10_000, step_s=0.01)
        self.memory_bytes = memory_bytes
        self.serving = False
        self.steps_end, self.reads = asyncio.Event(), asyncio.Event()
        self.steps_end.set()
        self.reads.set()
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def fetch(self, start: int, end: int, progress: Callable[[int, int], None]) -> None:
        await asyncio.sleep(1.0)

    async def load(self, start: int, end: int, progress: Callable[[int, int], None]) -> int:
        if (end - start) * LAYER_BYTES > self.memory_bytes or end > LAYERS:
            raise UserError(f"layers [{start}, {end}) asked of {LAYERS}, or too many")
        await asyncio.sleep(2.0)
        for layer in range(start, end):
            await self.reads.wait()
            progress((layer + 1 - start) * LAYER_BYTES, (end - start) * LAYER_BYTES)
        return (end - start) * LAYER_BYTES

    async def turn(self) -> None:
        await self.steps_end.wait()

    def start_serving(self, start: int, end: int) -> None:
        self.span, self.serving = (start, end), True

    async def unload(self) -> None:
        self.span = (0, 0)

    def stop_serving(self) -> None:
        self.serving = False


def record_of(
    transport: MemoryTransport, layers: int, rate: float, fall: float = 1.0
) -> NodeRecord:
    """The record of a peer that waits, with memory for this number of layers and one end of the
    model; its rate falls with the number of layers to the power of ``fall``."""
    return NodeRecord(
        peer_id=transport.peer_id,
        name="paper",
        software_version="0",
        device=DeviceSpec(kind="cpu", name="paper", memory_bytes=1),
        model=SPEC,
        memory_bytes=layers * LAYER_BYTES + 1,
        kv_tokens_min=KV_TOKENS_MIN,
        tokens_per_s=tuple(rate / j**fall for j in range(1, LAYERS + 1)),
        state=NodeState.WAITING,
        joined_unix_s=transport.now(),
    )


@dataclass
class Living:
    """One volunteer's whole process."""

    transport: MemoryTransport
    peer: Peer
    plans: PlanStore
    engine: LoadingEngine
    out: io.StringIO
    parts: Supervisor
    events: list[tuple[float, str, dict[str, Any]]]
    """What its coordinator reported, and when by the event loop's clock."""
    task: "asyncio.Task[None]" = field(init=False)

    def start(self) -> None:
        self.task = asyncio.create_task(self.peer.run())

    @property
    def held(self) -> tuple[int, int]:
        return self.engine.span if self.engine.serving else (0, 0)


class World:
    """Peers that come and go; only ``leader`` may coordinate, or anybody."""

    def __init__(
        self, seed: int, *, anybody_leads: bool = False, fall: float = 1.0, full: bool = False
    ) -> None:
        self.network = MemoryNetwork(random.Random(seed))
        self.peers: list[Living] = []
        self.leader = ""
        self.anybody_leads = anybody_leads
        self.fall = fall
        self.full = full
        """Whether plans are made for a full swarm, whatever is asked for."""

    def join(
        self,
        layers: int,
        rate: float = 100.0,
        machine: MachineWatch | None = None,
        traffic: LentTraffic | None = None,
        identity: Identity | None = None,
    ) -> Living:
        """A peer with memory for this number of layers and one end of the model.

        With ``machine``, it makes way for other work there; with ``identity``, it comes back.
        """
        transport = self.network.transport(identity)
        self.leader = self.leader or transport.peer_id
        directory = Directory(transport, NETWORK, SPEC.key)
        plans = PlanStore(transport, directory, model=SPEC)
        engine = LoadingEngine(transport.peer_id, layers * LAYER_BYTES)
        parts = Supervisor()
        stage = StageServer(
            transport,
            engine,
            StageConfig(chunk_tokens=16, hops=HopConfig(idle_s=30.0)),
            traffic,
            parts=parts,
            addresses_of=directory.addresses_of,
        )
        out = io.StringIO()
        clock, events = asyncio.get_running_loop(), list[tuple[float, str, dict[str, Any]]]()
        leaders = frozenset() if self.anybody_leads else frozenset({self.leader})
        config = CoordinatorConfig(coordinators=leaders)
        record = record_of(transport, layers, rate, self.fall)
        engine_of_any: Any = engine  # as much of a LocalEngine as a peer needs
        core = PeerCore(
            transport=transport,
            directory=directory,
            engine=engine_of_any,
            stage=stage,
            coordinator=Coordinator(
                transport,
                directory,
                plans,
                model=SPEC,
                config=config,
                on_event=lambda name, **fields: events.append((clock.time(), name, fields)),
                solve=solve_here,
                parts=parts,
            ),
            plans=plans,
            reporter=Reporter(json_log=False, out=out),
        )
        peer = Peer(
            core,
            record=record,
            config=PeerConfig(use=UseConfig(idle_only=machine is not None)),
            machine=machine,
            measured=MeasuredLinks(),
            parts=parts,
        )
        if self.full:
            peer._coordinator._demand.answer_weight = lambda plan: 0.0  # type: ignore[method-assign]
        living = Living(transport, peer, plans, engine, out, parts, events)
        living.start()
        self.peers.append(living)
        return living

    async def kill(self, living: Living) -> None:
        self.peers.remove(living)
        self.network.kill(living.transport.peer_id)
        living.task.cancel()
        await asyncio.gather(living.task, return_exceptions=True)

    def covered(self) -> bool:
        held = [living.held for living in self.peers]
        return all(any(a <= layer < b for a, b in held) for layer in range(LAYERS))

    async def until(self, condition: Callable[[], bool], limit_s: float) -> float:
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        while not condition():
            assert loop.time() - begun_s < limit_s, [living.held for living in self.peers]
            await asyncio.sleep(0.25)
        return loop.time() - begun_s

    async def ask(self, wait_s: float = 10.0) -> None:
        """One answer by a new client, which must be right."""
        swarm = PaperSwarm()
        swarm.network = self.network
        async with swarm.client(wait_s=wait_s) as client:
            answer = await client.generate(PROMPT, max_new_tokens=8)
        assert answer.token_ids == answer_of(PROMPT, 8)


@asynccontextmanager
async def world(*layers: int, seed: int = 1, full: bool = False) -> AsyncIterator[World]:
    """Peers with memory for this number of layers each, the first of whom coordinates, all
    serving."""
    made = World(seed, full=full)
    try:
        for count in layers:
            made.join(count)
        if layers:
            await made.until(made.covered, SETTLE_S)
        yield made
    finally:
        for living in list(made.peers):
            await made.kill(living)


@pytest.mark.virtual(limit_s=2000)
async def test_without_a_coordinator_the_last_plan_serves_on_and_a_joiner_helps_most():
    async with world(0, 3, 3, 3) as swarm:  # who leads has room for no layer
        leader, *rest = swarm.peers
        version = rest[0].plans.version
        spans = [living.held for living in rest]
        await swarm.kill(leader)
        await swarm.ask()
        joiner = swarm.join(3)
        await swarm.until(lambda: joiner.held != (0, 0), 3 * HELP_S)
        assert [living.held for living in rest] == spans, "nobody else moved"
        assert rest[0].plans.version == version, "there is no new plan"
        served = [sum(a <= n < b for a, b in spans) for n in range(LAYERS)]
        start, end = joiner.held
        assert served[start:end] == [1] * 3, "layers with a single holder"
        await swarm.ask()


@pytest.mark.virtual(limit_s=2000)
async def test_joiners_that_come_together_take_different_layers_and_waiting_clients_are_answered():
    async with world(2, 2, 2, 2) as swarm:
        leader, _, lost, _ = swarm.peers
        gone = [leader.held, lost.held]
        await swarm.kill(leader)
        await swarm.kill(lost)
        assert not swarm.covered()
        asked = asyncio.create_task(swarm.ask(wait_s=4 * HELP_S))
        await asyncio.sleep(5)
        one, two = swarm.join(2), swarm.join(2)
        took_s = await swarm.until(swarm.covered, 3 * HELP_S)
        assert took_s >= HELP_S - 10, "a coordinator may come back within a minute"
        assert {one.held, two.held} == set(gone)
        await asked


@pytest.mark.virtual(limit_s=2000)
async def test_a_peer_whose_device_is_lost_ends_rather_than_fail_every_session():
    async with world(6, 6) as swarm:
        _, broken = swarm.peers
        broken.engine.lost.set_result("unspecified launch failure")
        with pytest.raises(MachineError, match="unspecified launch failure"):
            await broken.task


@pytest.mark.virtual(limit_s=2000)
async def test_a_peer_whose_engine_stands_still_ends_rather_than_keep_its_layers():
    async with world(6, 6) as swarm:
        _, broken = swarm.peers
        broken.engine.steps_end.clear()
        await asyncio.sleep(60)
        assert not broken.task.done(), "a step may take long now and then"
        broken.engine.steps_end.set()
        await asyncio.sleep(600)
        assert not broken.task.done()
        broken.engine.steps_end.clear()
        with pytest.raises(MachineError, match="stands still"):
            await broken.task


@pytest.mark.virtual(limit_s=4000)
async def test_a_peer_whose_load_stands_still_ends_rather_than_be_counted_on():
    async with world(6, 6) as swarm:
        broken = swarm.join(6)
        broken.engine.reads.clear()
        await swarm.until(lambda: broken.peer.record.state is NodeState.LOADING, SETTLE_S)
        await asyncio.sleep(600)
        assert not broken.task.done(), "a disk may be slow"
        with pytest.raises(MachineError, match="loading stands still"):
            await broken.task


@pytest.mark.virtual(limit_s=2000)
async def test_whoever_holds_no_layers_says_why():
    async with world(seed=5) as swarm:
        swarm.join(2)
        follower = swarm.join(2)
        await asyncio.sleep(30)
        said = follower.out.getvalue()
        assert "No plan for all layers now: the 2 peers here can hold at most" in said
        assert said.count("waiting.") == 1
        swarm.join(LAYERS)
        await swarm.until(swarm.covered, SETTLE_S)


@pytest.mark.virtual(limit_s=2000)
@pytest.mark.parametrize(
    ("lie", "path", "spans"),
    [
        ({"layers": 2 * LAYERS}, "chain", [(0, LAYERS), (LAYERS, 2 * LAYERS)]),
        ({"layer_bytes": 0, "kv_bytes_per_token_layer": 0}, "beside", [(0, LAYERS), (0, LAYERS)]),
    ],
)
async def test_a_strangers_plan_for_layers_that_peers_do_not_have_ends_nobody(lie, path, spans):
    async with world(5, 5) as swarm:
        stranger = swarm.network.transport()
        directory = Directory(stranger, NETWORK, SPEC.key)
        store = PlanStore(stranger, directory)
        await store.serve()
        honest = swarm.peers[0].plans.newest
        assert honest is not None
        peers = [living.transport.peer_id for living in swarm.peers]
        chains = [peers] if path == "chain" else [[peer] for peer in peers]
        term = honest.version.term + 1
        plan = replace(
            honest,
            version=replace(honest.version, term=term),
            coordinator=stranger.peer_id,
            model=replace(SPEC, **lie),
            assignments=tuple(
                Assignment(peer_id=peer, start=start, end=end)
                for peer, (start, end) in zip(peers, spans, strict=True)
            ),
            edges=tuple(
                FlowEdge(tail=tail, head=head, tokens_per_s=1.0)
                for chain in chains
                for tail, head in pairwise([SOURCE, *chain, SINK])
            ),
            flow_tokens_per_s=float(len(chains)),
            bound_tokens_per_s=1e9,
            waves=(),
        )
        assert not check_shape(plan)
        await directory.publish(await store.add(plan))
        before = [living.plans.counters["refused"] for living in swarm.peers]
        await swarm.until(
            lambda: all(
                living.plans.counters["refused"] > refused or living.plans.version.term >= term
                for living, refused in zip(swarm.peers, before, strict=True)
            ),
            SETTLE_S,
        )
        await asyncio.sleep(60)
        assert not any(living.task.done() for living in swarm.peers)
        assert swarm.covered()
        await swarm.ask()


@pytest.mark.virtual(limit_s=2000)
async def test_a_peer_whose_month_is_used_lends_again_in_the_next(monkeypatch: pytest.MonkeyPatch):
    begun_s = asyncio.get_running_loop().time()
    new_year = datetime(2027, 1, 1, tzinfo=UTC).timestamp()

    def calendar() -> float:
        return new_year - 600 + asyncio.get_running_loop().time() - begun_s

    monkeypatch.setattr(time, "time", calendar)
    async with world(8, 8, seed=3) as swarm:
        traffic = LentTraffic(month_bytes_max=1e9)
        lender = swarm.join(8, traffic=traffic)
        await swarm.until(lambda: lender.held != (0, 0), SETTLE_S)
        traffic.sent(2_000_000_000)
        await swarm.until(lambda: lender.held == (0, 0), SETTLE_S)
        said = lender.out.getvalue()
        assert "Stepping aside, 2.00 GB of this month's 1 GB are used" in said
        assert "the count starts again on 2027-01-01 (UTC)" in said
        await asyncio.sleep(300)
        assert lender.held == (0, 0)
        assert not lender.task.done()
        back_s = UseConfig().calm_for_s + SETTLE_S
        await swarm.until(lambda: lender.held != (0, 0), 300 + back_s)
        assert calendar() >= new_year


async def made_up_holder(swarm: World, start: int, end: int, rate: float) -> None:
    """Announce layers that nobody holds, again and again, and answer pings, as if they were held.

    The stranger says first that it waits, as a peer does, and then that it serves.
    """
    transport = swarm.network.transport()
    directory = Directory(transport, NETWORK, SPEC.key)
    await PlanStore(transport, directory).serve()
    while True:
        record = replace(
            record_of(transport, LAYERS, rate), state=NodeState.SERVING, start=start, end=end
        )
        await directory.publish(record)
        await asyncio.sleep(5)


@pytest.mark.virtual(limit_s=3000)
@pytest.mark.parametrize("rate", [50.0, 100.0, 1000.0])
async def test_strangers_that_announce_all_layers_take_none_from_their_holders(rate: float) -> None:
    async with world(LAYERS, 5, 5, 5, 5) as swarm:
        await asyncio.sleep(60)
        strangers = [asyncio.create_task(made_up_holder(swarm, 0, LAYERS, rate)) for _ in range(4)]
        loop, versions = asyncio.get_running_loop(), set()
        end_s = loop.time() + 900
        while loop.time() < end_s:
            assert swarm.covered(), [living.held for living in swarm.peers]
            versions.add(swarm.peers[0].plans.version)
            await asyncio.sleep(0.25)
        for task in strangers:
            task.cancel()
        assert len(versions) > 1, "the coordinator planned with the strangers"


@pytest.mark.virtual(limit_s=3000)
async def test_strangers_who_come_and_go_leave_two_holders_of_every_layer() -> None:
    """Each announces all layers for a while, under one name after another: no holder that can
    spare its layers, as long as the strangers are there, is planned onto others. A move among the
    others, for their own sake, leaves one holder meanwhile."""
    async with world(LAYERS, 5, 5, 5, 5) as swarm:
        await asyncio.sleep(150)
        lent = [peer for peer in swarm.peers if peer.held != (0, 0)]

        names = {peer.transport.peer_id for peer in lent}

        def fewest() -> int:
            holders = Counter(layer for peer in lent for layer in range(*peer.held))
            return min(holders[layer] for layer in range(LAYERS))

        def fewest_planned() -> int:
            plan = swarm.peers[0].plans.newest
            assert plan is not None
            return replication([a for a in plan.assignments if a.peer_id in names], LAYERS)

        assert fewest() >= 2, [peer.held for peer in lent]
        versions = set()
        for _ in range(8):
            strangers = [
                asyncio.create_task(made_up_holder(swarm, 0, LAYERS, 1000.0)) for _ in range(4)
            ]
            for _ in range(60):
                await asyncio.sleep(1)
                assert fewest() >= 1, [peer.held for peer in lent]
                assert fewest_planned() >= 2, swarm.peers[0].plans.newest
                versions.add(swarm.peers[0].plans.version)
            for task in strangers:
                task.cancel()
            await swarm.until(lambda: fewest() >= 2, SETTLE_S)
        assert len(versions) > 1, "the coordinator planned with the strangers"


class Desk:
    """A machine that somebody may sit down at."""

    def __init__(self) -> None:
        self.used = False

    def look(self) -> Seen:
        return Seen(minute=0, input_ago_s=0.0 if self.used else 1e9)


async def leave_as_a_plan_comes(swarm: World, leaver: Living) -> None:
    """The plan has layers for the peer that leaves."""
    plan = leaver.plans.newest
    assert plan is not None
    assert plan.assignment_of(leaver.transport.peer_id) is not None
    leaver.peer.leave()
    await swarm.until(lambda: "Leaving" in leaver.out.getvalue(), 5.0)
    later = replace(plan.version, counter=plan.version.counter + 1)
    await leaver.peer._follower.enter(replace(plan, version=later))


@pytest.mark.virtual(limit_s=600)
async def test_a_peer_that_leaves_follows_no_plan_that_comes_meanwhile() -> None:
    half = LAYERS // 2
    async with world(half, half, half, half) as swarm:
        twice = sorted(2 * [(0, half), (half, LAYERS)])
        await swarm.until(lambda: sorted(living.held for living in swarm.peers) == twice, SETTLE_S)
        asking = PaperSwarm()
        asking.network = swarm.network
        async with asking.client() as client:
            running = client.begin(PROMPT, max_new_tokens=NEW)
            left: Living | None = None
            tokens: list[int] = []
            async for piece in running:
                tokens += piece.token_ids
                if len(tokens) < 20 or left is not None:
                    continue
                first = running.route[0].peer_id
                left = next(peer for peer in swarm.peers if peer.transport.peer_id == first)
                await leave_as_a_plan_comes(swarm, left)
            assert left is not None
            assert tuple(tokens) == answer_of(PROMPT, NEW)
            assert running.answer().failovers == 0
            assert left.held == (0, 0)
            await left.task


@pytest.mark.virtual(limit_s=3000)
async def test_a_peer_that_waits_for_a_holder_makes_way_for_its_owner() -> None:
    async with world(LAYERS, 5, full=True) as swarm:
        desks = [Desk() for _ in range(4)]
        lenders = [swarm.join(5, machine=desk) for desk in desks]
        await asyncio.sleep(90)
        strangers = [asyncio.create_task(made_up_holder(swarm, 0, LAYERS, 100.0)) for _ in range(4)]

        def waiting() -> list[int]:
            return [
                number
                for number, living in enumerate(lenders)
                if living.held != (0, 0) and living.peer._follower._moving.locked()
            ]

        await swarm.until(lambda: bool(waiting()), 1200)
        held = waiting()
        for number in held:
            desks[number].used = True
        await swarm.until(lambda: all(lenders[number].held == (0, 0) for number in held), SETTLE_S)
        for task in strangers:
            task.cancel()


class FarHubEngine(LoadingEngine):
    """Fetches the files of other layers for hours while it serves."""

    async def fetch(self, start: int, end: int, progress: Callable[[int, int], None]) -> None:
        await asyncio.sleep(4 * 3600.0 if self.serving else 1.0)


@pytest.mark.virtual(limit_s=2000)
async def test_a_peer_that_fetches_files_for_a_move_makes_way_for_its_owner() -> None:
    async with world(LAYERS, LAYERS) as swarm:
        desk = Desk()
        lender = swarm.join(LAYERS, machine=desk)
        await swarm.until(lambda: lender.held != (0, 0), SETTLE_S)
        lender.engine.__class__ = FarHubEngine
        plan, (start, end) = lender.plans.newest, lender.held
        assert plan is not None

        def fetches() -> int:
            return lender.out.getvalue().count("Fetching layers")

        before = fetches()
        elsewhere = replace(
            plan,
            version=replace(plan.version, counter=plan.version.counter + 1),
            assignments=(
                Assignment(peer_id=lender.transport.peer_id, start=start, end=end - 1),
                *(a for a in plan.assignments if a.peer_id != lender.transport.peer_id),
            ),
        )
        await lender.plans.add(elsewhere)
        await swarm.until(lambda: fetches() > before, SETTLE_S)
        assert lender.held == (start, end)
        desk.used = True
        await swarm.until(lambda: lender.held == (0, 0), SETTLE_S)
        assert lender.peer.figures().aside == "somebody uses this machine", "its owner is told why"
        desk.used = False
        await swarm.until(lambda: lender.held != (0, 0), UseConfig().calm_for_s + SETTLE_S)
        assert lender.peer.figures().aside == ""


class SlowDiskEngine(LoadingEngine):
    """Reads its layers for hours."""

    loads = 0

    async def load(self, start: int, end: int, progress: Callable[[int, int], None]) -> int:
        self.loads += 1
        await asyncio.sleep(4 * 3600.0)
        return await super().load(start, end, progress)


@pytest.mark.virtual(limit_s=2000)
async def test_a_peer_that_loads_layers_makes_way_for_its_owner_also_when_it_comes_back() -> None:
    """A game needs the memory now, and its owner may want it again while the peer comes back."""
    async with world(LAYERS, LAYERS) as swarm:
        desk = Desk()
        lender = swarm.join(LAYERS, machine=desk)
        engine = lender.engine
        engine.__class__ = SlowDiskEngine
        assert isinstance(engine, SlowDiskEngine)
        for times in (1, 2):
            await swarm.until(lambda times=times: engine.loads == times, 600)
            desk.used = True
            await swarm.until(lambda: lender.peer.figures().aside != "", SETTLE_S)
            assert lender.peer.record.state is NodeState.DRAINING
            desk.used = False
        assert lender.out.getvalue().count("Stepping aside") == 2


class NoHubEngine(LoadingEngine):
    """Cannot fetch a file while the hub is away."""

    hub_is_there = False

    async def fetch(self, start: int, end: int, progress: Callable[[int, int], None]) -> None:
        await asyncio.sleep(30.0)
        if not self.hub_is_there:
            raise NetworkError("the hub cannot be reached")


def without_hub(living: Living) -> NoHubEngine:
    living.engine.__class__ = NoHubEngine
    assert isinstance(living.engine, NoHubEngine)
    return living.engine


@pytest.mark.virtual(limit_s=2000)
async def test_others_serve_the_layers_whose_files_a_peer_cannot_fetch():
    """The planner gives them to others, and this peer layers again once it can fetch them."""
    async with world() as swarm:
        swarm.join(0)
        away = swarm.join(5, rate=1000.0)
        engine = without_hub(away)
        swarm.join(5)
        await swarm.until(lambda: away.peer.record.state is NodeState.DRAINING, SETTLE_S)
        assert "the hub cannot be reached" in away.out.getvalue()
        assert not swarm.covered()
        swarm.join(5)
        await swarm.until(swarm.covered, SETTLE_S)
        await swarm.ask()
        engine.hub_is_there = True
        await swarm.until(lambda: away.held != (0, 0), SETTLE_S + 4 * HELP_S)


@pytest.mark.virtual(limit_s=2000)
async def test_who_cannot_fetch_while_nobody_leads_tries_again():
    async with world(0, 6, 6) as swarm:
        leader, _, lost = swarm.peers
        await swarm.kill(leader)
        await swarm.kill(lost)
        away = swarm.join(6)
        engine = without_hub(away)
        await swarm.until(lambda: away.peer.record.state is NodeState.DRAINING, 3 * HELP_S)
        engine.hub_is_there = True
        await swarm.until(swarm.covered, 4 * HELP_S)
        await swarm.ask()
