"""A part of a peer that fails is set up again, and does its work as before."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from inspect import iscoroutinefunction
from typing import Any

import pytest

from client import Swarm, SwarmConfig
from client.health.history import History
from client.health.prober import Prober, ProberConfig
from client.text.tokenizer import ModelText
from client.view.reader import SwarmReader
from coordinator.plans.election.leadership import Leadership
from coordinator.plans.store import PlanStore
from coordinator.policies.failure import pinger
from coordinator.policies.failure.liveness import Liveness
from coordinator.policies.failure.pinger import BY_PEERS
from dht.errors import MachineError, SwarmError
from dht.process.supervision import RESTART_S, Supervisor
from dht.records.directory import LIFETIME_S, Directory, RecordKind
from dht.transport.interface import PLAN_PROTOCOL
from node.links.lent_traffic import LentTraffic
from node.links.reachability import ReachKeeper
from node.owner.idle_policy import Seen, UseConfig
from node.peer.announcer import Announcer
from node.peer.balancer import Balancer
from node.peer.link_keeper import LinkKeeper
from node.peer.plan_follower import PlanFollower
from node.stage.server import StageServer
from testing.clock import run_virtual
from testing.network import MemoryNetwork, MemoryTransport
from tests.sim.paper_swarm import NETWORK, SPEC
from tests.sim.test_self_help import HELP_S, SETTLE_S, LoadingEngine, World, world

pytestmark = pytest.mark.sim


@pytest.mark.virtual(limit_s=1000)
async def test_a_silent_peer_is_pinged_where_its_record_says_that_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may come back elsewhere, and who is not connected to it would not reach it otherwise."""
    opens, asked = MemoryTransport.open_stream, list[tuple[str, ...]]()
    async with world(5, 5, seed=3) as swarm:
        leader, away = (each.transport for each in swarm.peers)

        async def noted(
            self: MemoryTransport, peer_id: str, protocol: str, **where: tuple[str, ...]
        ) -> Any:
            if (self, peer_id, protocol) == (leader, away.peer_id, PLAN_PROTOCOL):
                asked.append(where.get("addresses", ()))
            return await opens(self, peer_id, protocol, **where)

        monkeypatch.setattr(MemoryTransport, "open_stream", noted)
        swarm.network.freeze(away.peer_id)
        await asyncio.sleep(20)  # its record outlives that
        assert len(asked) > BY_PEERS.silent_misses
        assert set(asked) == {away.addresses}


@pytest.mark.virtual(limit_s=100)
async def test_who_is_watched_again_is_pinged_again() -> None:
    network = MemoryNetwork(random.Random(1))
    here, there = network.transport(), network.transport()
    await PlanStore(there, Directory(there, NETWORK, SPEC.key)).serve()
    liveness = Liveness(here)
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
                if self is directory and failed < 2:
                    failed += 1
                    raise OSError(24, "Too many open files")
                return await reads(self, **how)

            monkeypatch.setattr(type(directory), "leases", leases)
            await swarm.until(lambda: failed == 2, SETTLE_S)
            await asyncio.sleep(30)
            await swarm.kill(lost)

            def replanned() -> bool:
                plan = leader.plans.newest
                return plan is not None and plan.assignment_of(lost.transport.peer_id) is None

            await swarm.until(replanned, LIFETIME_S[RecordKind.NODES] / 2)
            await swarm.ask()

    run_virtual(scenario(), limit_s=1000)


class Once:
    """Lets a method fail from the next call on, ``times`` in all, and counts what returns after."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, where: Any, name: str) -> None:
        self.left = self.failed = self.returned = 0
        real = getattr(where, name)

        def fails() -> None:
            if self.left:
                self.left -= 1
                self.failed += 1
                raise OSError(24, "Too many open files")

        async def waited(*given: Any, **named: Any) -> Any:
            fails()
            result = await real(*given, **named)
            self.returned += bool(self.failed)
            return result

        def called(*given: Any, **named: Any) -> Any:
            fails()
            result = real(*given, **named)
            self.returned += bool(self.failed)
            return result

        monkeypatch.setattr(where, name, waited if iscoroutinefunction(real) else called)

    @property
    def works_again(self) -> bool:
        return self.failed > 0 and self.left == 0 and self.returned > 0


PARTS = [
    (Leadership, "look"),
    (Directory, "plan_heads"),
    (StageServer, "_give_up_idle"),
    (Announcer, "_note_load"),
    (LinkKeeper, "_round"),
    (Balancer, "look"),
    (LentTraffic, "save"),
    (PlanFollower, "_mind_waiting"),
    (PlanFollower, "enter"),
    (LoadingEngine, "load"),
    (ReachKeeper, "look"),
    (StageServer, "hop_in_use"),
    (SwarmReader, "refresh"),
    (pinger._Line, "round_trip_s"),
    (Prober, "_ask"),
    (Prober, "show"),
]


@pytest.mark.parametrize(
    ("where", "name"), PARTS, ids=[f"{where.__name__}.{name}" for where, name in PARTS]
)
@pytest.mark.virtual(limit_s=2000)
async def test_every_part_of_a_peer_and_a_client_works_again_after_it_failed(
    where: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world(0, 5, 5, 5, 5, seed=3) as swarm, page(swarm) as parts:
        fault = Once(monkeypatch, where, name)
        await asyncio.sleep(20)
        fault.left = 1
        await swarm.kill(swarm.peers[-1])  # others follow a new plan

        async def asked() -> None:
            with suppress(SwarmError):  # what the fault itself cost
                await swarm.ask()

        for _ in range(60):
            await asyncio.sleep(5)
            await asked()
            if fault.works_again:
                break
        assert fault.works_again, (fault.failed, fault.returned)
        failures = sum((each.parts.failures for each in swarm.peers), parts.failures)
        assert failures.total() == 1
        assert not any(each.task.done() for each in swarm.peers)
        await swarm.until(swarm.covered, SETTLE_S)
        await swarm.ask()


@asynccontextmanager
async def page(swarm: World) -> AsyncIterator[Supervisor]:
    """A client that pings who serves, and the health page's prober over it."""
    config = SwarmConfig(network=NETWORK, wait_s=10.0, pings_always=True)
    async with Swarm.over(swarm.network.transport(), ModelText(name=SPEC.name), config) as client:
        history = History(None)
        prober = Prober(client, history, ProberConfig(every_s=5.0))
        async with client.reader.parts.beside(prober.run):
            yield client.reader.parts
        history.close()


@pytest.mark.virtual(limit_s=2000)
async def test_a_part_that_cannot_be_set_up_again_ends_the_peer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For the unit or container to start it anew: before, it tried every 5 s for ever."""
    async with world(5, 5, seed=3) as swarm:
        fault = Once(monkeypatch, StageServer, "_give_up_idle")
        fault.left = 1000
        await asyncio.gather(*(swarm.ask() for _ in range(3)), return_exceptions=True)
        with pytest.raises(MachineError, match=r"failed 3 times within 60 s.*Too many open"):
            await swarm.peers[0].task


@pytest.mark.virtual(limit_s=2000)
async def test_a_look_at_others_that_always_fails_ends_no_peer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What every peer looks at would else end all of them at once."""
    async with world(5, 5, seed=3) as swarm:
        fault = Once(monkeypatch, Leadership, "look")
        fault.left = 1000
        await asyncio.sleep(120)
        assert fault.left < 980
        assert not any(each.task.done() for each in swarm.peers)
        await swarm.ask()


class Machine:
    """What a peer sees of its machine: somebody at the keyboard, nobody, or an error."""

    def __init__(self) -> None:
        self.used = False
        self.errors = 0

    def look(self) -> Seen:
        if self.errors:
            self.errors -= 1
            raise OSError(24, "Too many open files")
        return Seen(minute=0, input_ago_s=0.0 if self.used else 1e9)


@pytest.mark.virtual(limit_s=1000)
async def test_a_peer_that_stepped_aside_comes_back_although_its_watch_failed_meanwhile() -> None:
    async with world(5, 5, seed=3) as swarm:
        machine = Machine()
        lender = swarm.join(8, machine=machine)
        await swarm.until(lambda: lender.held != (0, 0), SETTLE_S)
        machine.used = True
        await swarm.until(lambda: lender.held == (0, 0), SETTLE_S)
        machine.errors, machine.used = 1, False
        await asyncio.sleep(20)
        assert lender.parts.failures == {"Peer._mind_owner": 1}
        assert lender.held == (0, 0)
        await swarm.until(lambda: lender.held != (0, 0), UseConfig().calm_for_s + SETTLE_S)


@pytest.mark.virtual(limit_s=2000)
async def test_whoever_cannot_be_pinged_ends_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a peer sends that makes its ping raise, it may not end those that ping it."""
    async with world(5, 5, seed=3) as swarm, page(swarm) as parts:
        fault = Once(monkeypatch, pinger._Line, "round_trip_s")
        fault.left = 100
        await swarm.until(lambda: fault.left == 0, 500)
        await asyncio.sleep(20)
        assert fault.works_again
        assert 0 < parts.failures["Pinger._follow"] < 100, "the page's pings, and peers' own"
        assert not any(each.task.done() for each in swarm.peers)


def test_a_look_that_fails_does_not_stop_a_coordinator_from_following_plans(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Strangers may fill a peer's descriptors as it looks; plans still reach it meanwhile."""

    async def scenario() -> None:
        async with world(0, 5, 5, 5, seed=3) as swarm:
            leader, follower, *_ = swarm.peers
            await asyncio.sleep(10)
            reads, failed_s = Directory.leases, 0.0
            loop = asyncio.get_running_loop()
            directory = follower.plans._directory

            async def leases(self: Directory, **how: Any) -> Any:
                nonlocal failed_s
                if self is directory and not failed_s:
                    failed_s = loop.time()
                    raise OSError(24, "Too many open files")
                return await reads(self, **how)

            monkeypatch.setattr(Directory, "leases", leases)
            await swarm.until(lambda: failed_s > 0, SETTLE_S)
            before = follower.plans.version
            await leader.peer._coordinator._republish()
            plan = leader.plans.newest
            assert plan is not None
            await leader.peer._coordinator._publish(
                replace(plan, version=leader.peer._coordinator._next_version()), "the test wants it"
            )
            assert leader.plans.version > before
            took_s = await swarm.until(
                lambda: follower.plans.version == leader.plans.version, RESTART_S
            )
            assert took_s < RESTART_S - 1, "not only once its look had begun again"

    run_virtual(scenario(), limit_s=1000)


@pytest.mark.virtual(limit_s=2000)
async def test_a_joiner_that_could_not_load_as_nobody_coordinated_tries_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with world(0, 3, 3, 3) as swarm:
        leader, *_ = swarm.peers
        await swarm.kill(leader)
        fault = Once(monkeypatch, LoadingEngine, "load")
        fault.left = 1
        joiner = swarm.join(3)
        await swarm.until(lambda: joiner.held != (0, 0), 3 * HELP_S)
        assert joiner.parts.failures == {"PlanFollower.help_oneself": 1}
