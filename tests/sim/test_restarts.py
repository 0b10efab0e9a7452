"""A part of a peer that fails is set up again, and does its work as before."""

import asyncio
from typing import Any

import pytest

from dht.directory import LIFETIME_S, RecordKind
from dht.virtual_time import run_virtual
from tests.sim.test_self_help import SETTLE_S, world

pytestmark = pytest.mark.sim


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
