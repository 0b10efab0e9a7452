"""The shell, on the in-memory network and a virtual clock: real elections, plans and losses."""

import asyncio
import random
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Never

import pytest

from coordinator.evaluation.plan_check import check_shape, uncovered
from coordinator.planning.solve import SolveAnswer, SolveRequest, solve_request
from coordinator.planning.solver_process import solve_apart
from coordinator.plans.reviewer import Reviewer
from coordinator.plans.store import PlanStore
from coordinator.plans.transition import TransitionConfig
from coordinator.runtime import FALLEN_BACK, Coordinator, CoordinatorConfig, Solver
from dht.messages.types import NodeRecord, NodeState, PlanVersion
from dht.records.directory import Directory
from testing.network import MemoryNetwork, MemoryTransport
from tests.unit.coordinator.problems import SOLVERS

pytestmark = pytest.mark.sim


STEPS = 100
"""What a solve may do, by how often it asks whether it may go on."""


async def solve_here(request: SolveRequest, limit_s: float) -> SolveAnswer:
    """In this process, as real processes do not run on a virtual clock; nor is there a real one.

    Without simulated runs within the simulation: they would take most of its time.
    """
    del limit_s
    asked = count()
    return solve_request(replace(request, thorough=False), lambda: next(asked) / STEPS)


async def solve_without_time(request: SolveRequest, limit_s: float) -> SolveAnswer:
    """As on a machine that is too busy to search at all."""
    del limit_s
    return solve_request(replace(request, thorough=False), lambda: 1.0)


@dataclass
class Member:
    """A peer that coordinates and does what plans say at once."""

    transport: MemoryTransport
    record: NodeRecord
    solve: Solver = solve_here
    events: list[tuple[str, dict]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.directory = Directory(self.transport, "net", self.record.model.key)
        review = Reviewer(self.transport, self.directory)
        self.plans = PlanStore(self.transport, self.directory, review=review)
        self.coordinator = Coordinator(
            self.transport,
            self.directory,
            self.plans,
            model=self.record.model,
            config=CoordinatorConfig(),
            on_event=lambda name, **fields: self.events.append((name, fields)),
            solve=self.solve,
        )

    def start(self) -> None:
        self.tasks = [
            asyncio.create_task(self.coordinator.run()),
            asyncio.create_task(self.announce()),
        ]

    async def announce(self) -> None:
        while True:
            plan = self.plans.newest
            mine = plan.assignment_of(self.transport.peer_id) if plan is not None else None
            if mine is not None:
                self.record = replace(
                    self.record, state=NodeState.SERVING, start=mine.start, end=mine.end
                )
            self.record = replace(self.record, plan_version=self.plans.version)
            await self.directory.publish(self.record)
            await asyncio.sleep(2.0)

    async def stop(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    def named(self, name: str) -> list[dict]:
        return [fields for event, fields in self.events if event == name]


class Swarm:
    def __init__(
        self,
        make,
        memories: list[int],
        *,
        seed: int = 1,
        solve: Solver = solve_here,
        **network,
    ) -> None:
        self.make = make
        self.solve = solve
        self.network = MemoryNetwork(random.Random(seed), dht_delay_s=0.05, **network)
        self.members: list[Member] = []
        for memory in memories:
            self.join(memory)

    def join(self, memory: int) -> Member:
        transport = self.network.transport()
        record = replace(
            self.make.record(transport.peer_id),
            memory_bytes=memory,
            joined_unix_s=transport.now(),
        )
        self.members.append(Member(transport, record, self.solve))
        return self.members[-1]

    async def __aenter__(self) -> "Swarm":
        for member in self.members:
            member.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        for member in self.members:
            await member.stop()

    async def kill(self, member: Member) -> None:
        self.members.remove(member)
        self.network.kill(member.transport.peer_id)
        await member.stop()

    def leaders(self) -> list[Member]:
        return [member for member in self.members if member.coordinator.leads]

    async def settle(self, condition, limit_s: float = 60.0) -> float:
        """Virtual seconds until ``condition()`` holds."""
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        while not condition():
            assert loop.time() - started_s < limit_s, "did not settle"
            await asyncio.sleep(0.25)
        return loop.time() - started_s

    def agreed(self) -> bool:
        """Everyone runs one plan that covers the model over the living."""
        plans = {member.plans.version for member in self.members}
        plan = self.members[0].plans.newest
        living = {member.transport.peer_id for member in self.members}
        return (
            len(plans) == 1
            and plan is not None
            and not check_shape(plan)
            and {a.peer_id for a in plan.assignments} <= living
        )


@pytest.mark.virtual(limit_s=1000)
async def test_peers_elect_one_and_follow_its_plan(make):
    async with Swarm(make, [450, 350, 450]) as swarm:
        assert await swarm.settle(lambda: swarm.agreed() and len(swarm.leaders()) == 1) < 15
        leader = swarm.leaders()[0].transport.peer_id
        for member in swarm.members:
            assert member.named("coordinator")[-1]["peer_id"] == leader
        assert len(swarm.members[0].plans.newest.assignments) == 3
        published = swarm.leaders()[0].named("plan")
        assert "there was no plan" in published[0]["reason"]
        await asyncio.sleep(120)
        assert len(swarm.leaders()[0].named("plan")) <= 2, "a steady swarm is left alone"


@pytest.mark.virtual(limit_s=1000)
async def test_a_killed_coordinator_is_replaced_soon(make):
    async with Swarm(make, [600, 600, 600]) as swarm:
        await swarm.settle(lambda: swarm.agreed() and len(swarm.leaders()) == 1)
        await asyncio.sleep(20)
        before = swarm.members[0].plans.version
        await swarm.kill(swarm.leaders()[0])
        assert await swarm.settle(lambda: len(swarm.leaders()) == 1) < 15
        assert await swarm.settle(swarm.agreed) < 15
        assert swarm.members[0].plans.version > before


@pytest.mark.virtual(limit_s=1000)
async def test_a_killed_stage_is_planned_around_and_a_newcomer_used(make):
    async with Swarm(make, [450, 450, 470, 600]) as swarm:
        await swarm.settle(lambda: swarm.agreed() and len(swarm.leaders()) == 1)
        await asyncio.sleep(10)
        victim = next(m for m in swarm.members if not m.coordinator.leads)
        await swarm.kill(victim)
        assert await swarm.settle(swarm.agreed) < 15
        new = swarm.join(1000)
        new.start()
        await swarm.settle(
            lambda: (
                swarm.agreed()
                and new.plans.newest is not None
                and new.plans.newest.assignment_of(new.transport.peer_id) is not None
            )
        )


@pytest.mark.virtual(limit_s=1000)
async def test_too_little_memory_is_said_once_and_a_joiner_mends_it(make):
    async with Swarm(make, [300, 300]) as swarm:
        await asyncio.sleep(60)
        said = [fields for member in swarm.members for fields in member.named("no_plan")]
        texts = [fields["reason"] for fields in said if fields["peers"] == 2]
        assert len(texts) == 1
        assert "the 2 peers here can hold at most 4 of 8 layers" in texts[0]
        swarm.join(700).start()
        await swarm.settle(swarm.agreed)


@pytest.mark.virtual(limit_s=1000)
async def test_a_peer_without_use_does_not_keep_the_solver_busy(make):
    solved = 0

    async def counting(request: SolveRequest, limit_s: float) -> SolveAnswer:
        nonlocal solved
        solved += 1
        return await solve_here(request, limit_s)

    swarm = Swarm(make, [1000, 20])
    for member in swarm.members:
        member.coordinator._solve = counting
    async with swarm:
        await asyncio.sleep(50)
        assert swarm.agreed()
        assert solved <= 3


@pytest.mark.virtual(limit_s=1000)
async def test_a_thorough_solve_waits_for_calm_and_ends_for_a_change(make):
    """The thorough solve never ends by itself here: what changes is planned for at once."""
    asked: list[tuple[bool, float]] = []
    ended: list[bool] = []

    async def solve(request: SolveRequest, limit_s: float) -> SolveAnswer:
        loop = asyncio.get_running_loop()
        asked.append((request.thorough, loop.time()))
        try:
            if request.thorough:
                await asyncio.Event().wait()
            return await solve_here(request, limit_s)
        except asyncio.CancelledError:
            ended.append(request.thorough)
            raise

    async with Swarm(make, [600, 600, 600], solve=solve) as swarm:
        await swarm.settle(lambda: swarm.agreed() and len(swarm.leaders()) == 1)
        await swarm.settle(lambda: asked[-1][0], 200.0)
        (*_, (_, before_s), (_, began_s)) = asked
        assert began_s - before_s >= TransitionConfig().calm_s
        await swarm.kill(next(m for m in swarm.members if not m.coordinator.leads))
        await swarm.settle(lambda: not asked[-1][0])
        assert ended == [True]
        await swarm.settle(swarm.agreed)


@pytest.mark.virtual(limit_s=10_000)
async def test_a_calm_swarm_is_solved_with_several_seeds_and_then_no_more(make):
    seeds: list[int] = []

    async def solve(request: SolveRequest, limit_s: float) -> SolveAnswer:
        if request.thorough:
            seeds.append(request.seed)
        return await solve_here(request, limit_s)

    config = TransitionConfig()
    async with Swarm(make, [600, 600, 600], solve=solve) as swarm:
        await swarm.settle(lambda: swarm.agreed() and len(swarm.leaders()) == 1)
        await asyncio.sleep(config.calm_s + 10 * config.period_s)
        tried = len(seeds)
        assert tried >= config.fruitless_max
        last = seeds[-config.fruitless_max :]
        assert len(set(last)) == config.fruitless_max, "each finds what others miss"
        await asyncio.sleep(5 * config.period_s)
        assert len(seeds) == tried
        await swarm.kill(next(m for m in swarm.members if not m.coordinator.leads))
        await swarm.settle(lambda: len(seeds) > tried, 2 * config.period_s)


@pytest.mark.virtual(limit_s=1000)
async def test_a_body_is_had_from_others_when_its_author_is_gone(make):
    network = MemoryNetwork(random.Random(5))
    transports = [network.transport() for _ in range(3)]
    author, adopter, _late = transports
    directories = [Directory(t, "net", make.model.key) for t in transports]
    stores = [PlanStore(t, d) for t, d in zip(transports, directories, strict=True)]
    for store in stores:
        await store.serve()
    plan = make.plan(
        [make.span(author.peer_id, 0, 8)],
        [make.edge("source", author.peer_id, 1.0), make.edge(author.peer_id, "sink", 1.0)],
    )
    plan = replace(plan, coordinator=author.peer_id)
    await directories[0].publish(await stores[0].add(plan))
    await stores[1].refresh()
    record = replace(make.record(adopter.peer_id), plan_version=plan.version)
    await directories[1].publish(record)
    network.kill(author.peer_id)
    await stores[2].refresh()
    assert stores[2].newest == plan
    assert (await stores[2].wait_newer(PlanVersion())) == plan


@pytest.mark.virtual(limit_s=1000)
async def test_a_broken_plan_is_refused(make):
    network = MemoryNetwork(random.Random(5))
    author, other = network.transport(), network.transport()
    directory = Directory(author, "net", make.model.key)
    store = PlanStore(author, directory)
    await store.serve()
    plan = make.plan([make.span(author.peer_id, 0, 7)], [])
    await directory.publish(await store.add(replace(plan, coordinator=author.peer_id)))
    reader = PlanStore(other, Directory(other, "net", make.model.key))
    await reader.refresh()
    await reader.refresh()
    assert reader.newest is None
    assert reader.counters["refused"] == 1


async def test_solving_in_a_process_of_its_own(make, tmp_path, monkeypatch):
    (tmp_path / "coordinator.py").write_text("")  # a user's own, where the peer was started
    monkeypatch.chdir(tmp_path)
    request = SolveRequest(
        problem=make.problem([(450, 100.0), (350, 50.0), (450, 80.0)]),
        version=PlanVersion(term=1, counter=1),
        coordinator="p0",
        time_limit_s=1.0,
        seed=1,
        now_unix_s=0.0,
    )

    answer = await solve_apart(request, 60.0)
    assert answer.best is not None
    assert check_shape(answer.best) == []
    late = await solve_apart(request, 0.01)
    assert "did not end within" in late.error


@pytest.mark.virtual(limit_s=1000)
@pytest.mark.parametrize("broken", sorted(SOLVERS))
async def test_where_or_tools_fails_a_living_swarm_is_planned_and_its_log_says_so(
    make, broken, monkeypatch, caplog
):
    def fails(*_: object, **__: object) -> Never:
        raise RuntimeError(f"{broken} is ill")

    monkeypatch.setattr(SOLVERS[broken], "solve", fails)
    async with Swarm(make, [600, 600, 600]) as swarm:
        await swarm.settle(swarm.agreed)
        plan = swarm.members[0].plans.newest
        assert not uncovered(plan.assignments, plan.model.layers)
    assert FALLEN_BACK % f"RuntimeError: {broken} is ill" in caplog.messages
