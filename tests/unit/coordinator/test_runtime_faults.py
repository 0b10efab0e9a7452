"""The shell under cuts, forged plans and joins, on the in-memory network and a virtual clock."""

import asyncio
import random
from dataclasses import replace

import pytest

from coordinator.plans.store import PlanStore
from coordinator.plans.transition import TransitionConfig
from dht.messages import codec
from dht.messages.peer import PlanBody, PlanRequest
from dht.messages.types import Plan
from dht.records.directory import Directory
from dht.transport.interface import PLAN_PROTOCOL, Stream
from testing.clock import run_virtual
from testing.network import MemoryNetwork
from tests.unit.coordinator.test_runtime import Swarm

pytestmark = pytest.mark.sim


@pytest.mark.virtual(limit_s=1000)
@pytest.mark.parametrize("seed", range(3))
async def test_a_cut_heals_to_one_leader_and_one_plan(make, seed):
    async with Swarm(make, [1000] * 4, seed=seed) as swarm:
        await swarm.settle(lambda: swarm.agreed() and len(swarm.leaders()) == 1)
        before = swarm.members[0].plans.version
        names = [member.transport.peer_id for member in swarm.members]
        swarm.network.partition(names[:2], names[2:])
        # Each side can hold the whole model: each goes on under a leader of its own.
        await swarm.settle(lambda: len(swarm.leaders()) == 2)
        swarm.network.heal()
        await swarm.settle(lambda: swarm.agreed() and len(swarm.leaders()) == 1, 90.0)
        assert swarm.members[0].plans.version > before
        leader = swarm.leaders()[0]
        await asyncio.sleep(TransitionConfig().calm_s)
        assert swarm.leaders() == [leader]
        await swarm.settle(swarm.agreed, 5.0)  # with what the thorough solve found, perhaps
        assert len(swarm.members[0].plans.newest.assignments) == 4


@pytest.mark.virtual(limit_s=1000)
async def test_a_joiner_gets_layers_and_nobody_moves(make):
    async with Swarm(make, [450, 350, 450]) as swarm:
        await swarm.settle(lambda: swarm.agreed() and len(swarm.leaders()) == 1)
        before = swarm.members[0].plans.newest
        await asyncio.sleep(10)
        new = swarm.join(160)
        new.start()

        def has_layers() -> bool:
            plan = new.plans.newest
            return plan is not None and plan.assignment_of(new.transport.peer_id) is not None

        await swarm.settle(lambda: has_layers() and swarm.agreed())
        assert set(before.assignments) < set(new.plans.newest.assignments)


def forged(body: bytes) -> bytes:
    return bytes([body[0] ^ 1]) + body[1:]


@pytest.mark.parametrize("forge", [forged, lambda _: b"", lambda body: body + b"x"])
def test_a_body_with_another_hash_is_not_taken(make, forge):
    async def body() -> None:
        network = MemoryNetwork(random.Random(5))
        author, other = network.transport(), network.transport()
        directory = Directory(author, "net", make.model.key)
        store = PlanStore(author, directory)
        plan: Plan = replace(
            make.plan(
                [make.span(author.peer_id, 0, 8)],
                [make.edge("source", author.peer_id, 1.0), make.edge(author.peer_id, "sink", 1.0)],
            ),
            coordinator=author.peer_id,
        )
        await directory.publish(await store.add(plan))
        real = codec.encode(plan)

        async def answer(stream: Stream) -> None:
            message = (await codec.read_frame(stream)).message
            assert isinstance(message, PlanRequest)
            await codec.send_frame(stream, PlanBody(sha256=message.sha256), forge(real))

        await author.serve(PLAN_PROTOCOL, answer)
        reader = PlanStore(other, Directory(other, "net", make.model.key))
        await reader.refresh()
        assert reader.newest is None
        assert sum(reader.counters.values()) == 1
        # The forged answer is held against the one who gave it, not against the plan.
        await store.serve()
        await asyncio.sleep(120)
        await directory.publish(store.head)
        await reader.refresh()
        assert reader.newest == plan

    run_virtual(body(), limit_s=1000)
