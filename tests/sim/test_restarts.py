"""A part of a peer that fails is set up again, and does its work as before."""

import asyncio
import random
from typing import Any

import pytest

from coordinator.failure.liveness import Liveness, LivenessConfig
from coordinator.plans.store import PlanStore
from dht.records.directory import LIFETIME_S, Directory, RecordKind
from dht.simulated.clock import run_virtual
from dht.simulated.network import MemoryNetwork
from tests.sim.paper_swarm import NETWORK, SPEC
from tests.sim.test_self_help import SETTLE_S, world

pytestmark = pytest.mark.sim


def test_who_is_watched_again_is_pinged_again() -> None:
    async def scenario() -> None:
        network = MemoryNetwork(random.Random(1))
        here, there = network.transport(), network.transport()
        await PlanStore(there, Directory(there, NETWORK, SPEC.key)).serve()
        liveness = Liveness(here, LivenessConfig())
        peers: dict[str, tuple[str, ...]] = {there.peer_id: ()}
        liveness.watch(peers, peers)
        await asyncio.sleep(10)
        assert liveness.answers(there.peer_id) is True
        await liveness.close()
        liveness.watch(peers, peers)
        network.kill(there.peer_id)
        await asyncio.sleep(30)
        assert liveness.silent == {there.peer_id}
        await liveness.close()

    run_virtual(scenario(), limit_s=100)


def test_a_coordinator_that_failed_for_a_while_still_sees_who_dies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such as one that ran out of descriptors. It sees so by its pings, not by old records."""

    async def scenario() -> None:
        async with world(0, 5, 5, 5, seed=3) as swarm:
            leader, lost, *_ = swarm.peers
            directory: Any = leader.plans._directory
            reads, failed = type(directory).leases, 0

            async def leases(self: Any, **how: Any) -> Any:
                nonlocal failed
                if self is directory and failed < 3:
                    failed += 1
                    raise OSError(24, "Too many open files")
                return await reads(self, **how)

            monkeypatch.setattr(type(directory), "leases", leases)
            await swarm.until(lambda: failed == 3, SETTLE_S)
            await asyncio.sleep(30)
            await swarm.kill(lost)

            def replanned() -> bool:
                plan = leader.plans.newest
                return plan is not None and plan.assignment_of(lost.transport.peer_id) is None

            await swarm.until(replanned, LIFETIME_S[RecordKind.NODES] / 2)
            await swarm.ask()

    run_virtual(scenario(), limit_s=1000)
