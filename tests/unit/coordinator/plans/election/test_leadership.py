"""The election as one peer sees it: whom it asks before it takes a coordinator for dead."""

import asyncio
import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from coordinator.plans.election.election import LEASE_S
from coordinator.plans.election.leadership import Leadership, LeadershipRules
from coordinator.plans.store import PlanStore
from coordinator.plans.transition import TransitionConfig
from dht.messages.types import LeaseRecord
from dht.records.directory import Directory
from testing.network import MemoryNetwork
from tests.unit.records import record_of


class Pings:
    """Who is silent here, and whether others confirm that."""

    def __init__(self) -> None:
        self.silent: frozenset[str] = frozenset()
        self.confirmed = False

    async def confirm_silent(self, peer_id: str, witnesses: Mapping[str, tuple[str, ...]]) -> bool:
        return self.confirmed


@pytest.mark.virtual(limit_s=100)
async def test_one_that_was_dead_and_leads_again_is_dead_only_if_others_confirm_it_again() -> None:
    transport = MemoryNetwork(random.Random(1)).transport()
    record = record_of("leader", 0, 8)
    directory, pings = Directory(transport, "net", record.model.key), Pings()
    liveness: Any = pings
    leadership = Leadership(
        transport,
        directory,
        PlanStore(transport, directory),
        liveness,
        model=record.model,
        rules=LeadershipRules(
            transition=TransitionConfig(),
            watchers=8,
            witnesses=3,
            coordinators=frozenset({"leader"}),
        ),
        on_event=lambda *_, **__: None,
    )
    lease = LeaseRecord(peer_id="leader", term=1, expires_unix_s=transport.now() + LEASE_S)

    async def followed() -> str | None:
        await asyncio.sleep(1)
        await leadership.look({"leader": record}, {"leader": lease})
        return leadership.election.leader

    assert await followed() == "leader"
    pings.silent, pings.confirmed = frozenset({"leader"}), True
    assert await followed() is None
    pings.silent, pings.confirmed = frozenset(), False
    lease = replace(lease, expires_unix_s=lease.expires_unix_s + 1)
    assert await followed() == "leader"
    pings.silent = frozenset({"leader"})
    assert await followed() == "leader"
