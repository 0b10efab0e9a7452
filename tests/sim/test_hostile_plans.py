"""Strangers whose plans would leave layers without an honest holder.

Real peers on the in-memory network under a virtual clock, as in :mod:`tests.sim.test_self_help`.
"""

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from coordinator.evaluation.plan_check import check_shape
from coordinator.plans.reviewer import Reviewer
from coordinator.plans.store import PlanStore
from dht.messages.types import (
    SINK,
    SOURCE,
    Assignment,
    FlowEdge,
    LeaseRecord,
    NodeState,
    PlanVersion,
)
from dht.records.directory import Directory
from tests.sim.paper_swarm import LAYERS, NETWORK, SPEC
from tests.sim.test_self_help import SETTLE_S, Living, World, record_of

pytestmark = pytest.mark.sim

HALF = LAYERS // 2
FLOW = 20.0
LOOKS_S = 120.0
"""Time for which the swarm is watched: peers would move within seconds."""


class Stranger:
    """Announces the first half of the layers, and holds none; answers pings and serves plans."""

    def __init__(self, swarm: World) -> None:
        self.swarm = swarm
        self.transport = swarm.network.transport()
        self.directory = Directory(self.transport, NETWORK, SPEC.key)
        self.store = PlanStore(self.transport, self.directory)
        self.leads = False

    @property
    def me(self) -> str:
        return self.transport.peer_id

    async def live(self) -> None:
        await self.store.serve()
        record = record_of(self.transport, HALF, 100.0)
        while True:
            serving = replace(record, state=NodeState.SERVING, start=0, end=HALF)
            await self.directory.publish(replace(serving, plan_version=self.store.version))
            if self.leads:
                await self.directory.publish(
                    LeaseRecord(
                        peer_id=self.me,
                        term=self._term,
                        expires_unix_s=self.transport.now() + 30,
                    )
                )
            await asyncio.sleep(2.0)

    @property
    def _term(self) -> int:
        return self.store.version.term

    async def plan(self, moved: Collection[Living], silent: Collection[Living]) -> None:
        """Publish a plan that has itself for the first half, ``moved`` for the second."""
        running = next(peer.plans.newest for peer in self.swarm.peers if peer.plans.newest)
        seen = max(peer.plans.version for peer in self.swarm.peers)
        names = [peer.transport.peer_id for peer in moved]
        share = FLOW / len(names)
        edges = [FlowEdge(tail=SOURCE, head=self.me, tokens_per_s=FLOW)]
        for name in names:
            edges.append(FlowEdge(tail=self.me, head=name, tokens_per_s=share))
            edges.append(FlowEdge(tail=name, head=SINK, tokens_per_s=share))
        plan = replace(
            running,
            version=PlanVersion(term=seen.term + 1, counter=1),
            coordinator=self.me,
            assignments=(
                Assignment(peer_id=self.me, start=0, end=HALF),
                *(Assignment(peer_id=name, start=HALF, end=LAYERS) for name in names),
            ),
            edges=tuple(edges),
            flow_tokens_per_s=FLOW,
            bound_tokens_per_s=FLOW,
            waves=(tuple(names),),
            silent=tuple(peer.transport.peer_id for peer in silent),
        )
        assert not check_shape(plan)
        await self.directory.publish(await self.store.add(plan))


@asynccontextmanager
async def halves(*layers: int) -> AsyncIterator[tuple[World, Stranger]]:
    """A swarm whose peers review plans and hold a half each, and a stranger in it."""
    swarm = World(1)
    living = None
    try:
        for count in (0, *layers):
            peer = swarm.join(count)
            peer.plans._review = Reviewer(peer.transport, peer.plans._directory)
        await swarm.until(swarm.covered, SETTLE_S)
        await swarm.until(lambda: all(p.held != (0, 0) for p in swarm.peers[1:]), SETTLE_S)
        stranger = Stranger(swarm)
        living = asyncio.create_task(stranger.live())
        await asyncio.sleep(5)
        yield swarm, stranger
    finally:
        if living is not None:
            living.cancel()
        for peer in list(swarm.peers):
            await swarm.kill(peer)


async def keeps_its_layers(swarm: World, seconds: float) -> None:
    """Each layer is served by an honest peer all the time."""
    loop = asyncio.get_running_loop()
    until_s = loop.time() + seconds
    while loop.time() < until_s:
        assert swarm.covered(), [peer.held for peer in swarm.peers]
        await asyncio.sleep(0.25)


@pytest.mark.virtual(limit_s=2000)
@pytest.mark.parametrize("leads", [False, True], ids=["a head alone", "the lease, too"])
@pytest.mark.parametrize("names_silent", [True, False], ids=["called silent", "left out"])
@pytest.mark.parametrize("holders", [1, 2])
async def test_a_strangers_plan_takes_no_layer_from_its_last_holder(
    holders: int, names_silent: bool, leads: bool
) -> None:
    """The plan leaves out the honest holders of one half, and moves those of the other there."""
    async with halves(*(HALF,) * 2 * holders) as (swarm, stranger):
        if leads:
            for peer in swarm.peers:  # else only the named leader's lease would count
                peer.plans._coordinators = frozenset()
                rules = peer.peer._coordinator._leadership
                rules._rules = replace(rules._rules, coordinators=frozenset())
        first = [peer for peer in swarm.peers if peer.held == (0, HALF)]
        others = [peer for peer in swarm.peers if peer.held == (HALF, LAYERS)]
        assert len(first) == len(others) == holders
        stranger.leads = leads
        await stranger.plan(first, others if names_silent else ())
        await keeps_its_layers(swarm, LOOKS_S)
        followed = {peer.plans.newest.coordinator for peer in swarm.peers}
        assert leads or stranger.me not in followed, "it holds no lease"
        stranger.leads = False
        await keeps_its_layers(swarm, LOOKS_S)
