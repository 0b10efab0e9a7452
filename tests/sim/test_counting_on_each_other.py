"""Holders that count on each other: of two that plans tell to go, one at most does.

Real peers on the in-memory network under a virtual clock, as in
:mod:`tests.sim.test_hostile_plans`.
"""

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations

import pytest

from coordinator.policies.failure.pinger import BY_PEERS
from dht.messages import codec
from dht.messages.types import Plan, PlanHead, PlanVersion
from tests.sim.paper_swarm import LAYERS
from tests.sim.test_hostile_plans import HALF, LOOKS_S, halves, keeps_its_layers
from tests.sim.test_self_help import Living, World

pytestmark = pytest.mark.sim


async def adopt(peer: Living, plan: Plan) -> None:
    """Have a peer follow a plan, as it does after its review."""
    body = codec.encode(plan)
    head = PlanHead(
        version=plan.version,
        peer_id=plan.coordinator,
        sha256=hashlib.sha256(body).hexdigest(),
        size_bytes=len(body),
    )
    await peer.plans._adopt(plan, head, body)


def swapped(plan: Plan, version: PlanVersion, first: Living, then: Living) -> Plan:
    """``plan``, in which both peers take the second half instead, one after the other."""
    both = [peer.transport.peer_id for peer in (first, then)]
    moved = tuple(
        replace(a, start=HALF, end=LAYERS) if a.peer_id in both else a for a in plan.assignments
    )
    return replace(
        plan, version=version, assignments=moved, edges=(), waves=tuple((p,) for p in both)
    )


def pair(swarm: World, held: tuple[int, int]) -> Sequence[Living]:
    return [peer for peer in swarm.peers if peer.held == held]


@pytest.mark.virtual(limit_s=2000)
async def test_who_publishes_two_plans_takes_no_layer_from_its_last_holder() -> None:
    """Of one version: in each, another of the two holders goes last, so that the first counts on
    it. One goes at most."""
    async with halves(HALF, HALF, HALF, HALF) as (swarm, _):
        holders = pair(swarm, (0, HALF))
        running = holders[0].plans.newest
        assert running is not None
        version = replace(running.version, counter=running.version.counter + 1)
        await swarm.kill(swarm.peers[0])  # or it would plan anew
        for one, other in permutations(holders):
            one.peer._announcer.set_moved(0.0)
            await adopt(one, swapped(running, version, one, other))
        await keeps_its_layers(swarm, LOOKS_S)
        assert sum(peer.held == (0, HALF) for peer in holders) == 1, "the other went"


@pytest.mark.virtual(limit_s=2000)
async def test_whoever_announces_layers_under_many_names_and_is_silent_makes_no_emergency() -> None:
    """Nor do more stages than are asked at one look."""
    async with halves(HALF, HALF) as (swarm, _):
        (mine,) = pair(swarm, (0, HALF))
        (beside,) = pair(swarm, (HALF, LAYERS))
        plan, follower = mine.plans.newest, mine.peer._follower
        assert plan is not None
        nodes = await follower._directory.nodes()
        own = plan.assignment_of(mine.transport.peer_id)
        assert own is not None
        plan = replace(plan, assignments=(own,))  # it leaves the honest one out
        honest = nodes[beside.transport.peer_id]
        false = {f"0{n}": replace(honest, peer_id=f"0{n}") for n in range(40)}
        for _ in range(4):
            there = await follower._answering(plan, mine.peer.record, nodes | false)
            assert honest.peer_id in there
        swarm.network.kill(honest.peer_id)
        await asyncio.sleep(6.0)  # its last answer counts no more
        for _ in range(BY_PEERS.silent_misses):  # where all were asked in vain there is one
            there = await follower._answering(plan, mine.peer.record, {honest.peer_id: honest})
        assert honest.peer_id not in there


@pytest.mark.virtual(limit_s=2000)
async def test_a_lost_answer_makes_no_emergency() -> None:
    """A machine that is busy for a moment misses a ping: nobody leaves its layers for that."""
    async with halves(HALF, HALF) as (swarm, _):
        (mine,) = pair(swarm, (0, HALF))
        (beside,) = pair(swarm, (HALF, LAYERS))
        plan, follower = mine.plans.newest, mine.peer._follower
        assert plan is not None
        honest = (await follower._directory.nodes())[beside.transport.peer_id]
        nodes = {honest.peer_id: honest}
        swarm.network.kill(honest.peer_id)
        for misses in range(1, BY_PEERS.silent_misses + 1):
            there = await follower._answering(plan, mine.peer.record, nodes)
            assert (honest.peer_id in there) == (misses < BY_PEERS.silent_misses)
