"""Coordinators that lie, against the real shell on the in-memory network and a virtual clock."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from coordinator.plans.store import PlanStore
from coordinator.plans.versions import number_max
from dht.errors import NetworkError
from dht.messages import codec
from dht.messages.peer import Witness, WitnessRequest
from dht.messages.session import Ping, Pong
from dht.messages.types import NO_VERSION, FlowEdge, LeaseRecord, NodeState, Plan, PlanVersion
from dht.records.directory import Directory
from dht.transport.interface import PLAN_PROTOCOL, Stream
from testing.network import MemoryTransport
from tests.unit.coordinator.conftest import Make
from tests.unit.coordinator.test_runtime import Swarm

pytestmark = pytest.mark.sim

FAR = 1 << 48
HONEST = [1000, 1000, 1000]


class Liar:
    """A member of the swarm that says what it likes, every second."""

    def __init__(self, swarm: Swarm) -> None:
        self.swarm = swarm
        self.transport: MemoryTransport = swarm.network.transport()
        self.directory = Directory(self.transport, "net", Make.model.key)
        self.store = PlanStore(self.transport, self.directory)
        self.record = replace(
            Make.record(self.transport.peer_id),
            tokens_per_s=(),
            joined_unix_s=self.transport.now(),
        )
        self.heads: set[PlanVersion] = set()

    @property
    def me(self) -> str:
        return self.transport.peer_id

    @property
    def term_max(self) -> int:
        return number_max(self.transport.now())

    async def claim(self, term: int, version: PlanVersion) -> None:
        """A node record, and a lease."""
        await self.directory.publish(replace(self.record, plan_version=version))
        await self.directory.publish(
            LeaseRecord(peer_id=self.me, term=term, expires_unix_s=self.transport.now() + 30)
        )

    async def publish(self, plan: Plan) -> None:
        """A plan that is newer than any other."""
        plan = replace(plan, coordinator=self.me)
        self.heads.add(plan.version)
        await self.directory.publish(await self.store.add(plan))

    def whole(self, *peers: str, version: PlanVersion, rate: float) -> Plan:
        """A plan that gives every layer to each of ``peers``."""
        spans = [Make.span(peer, 0, 8) for peer in peers]
        edges = []
        for peer in peers:
            edges += [
                FlowEdge(tail="source", head=peer, tokens_per_s=rate),
                FlowEdge(tail=peer, head="sink", tokens_per_s=rate),
            ]
        return Make.plan(spans, edges, version=version)

    async def lie(self, how: Callable[["Liar"], Awaitable[None]]) -> None:
        await self.store.serve()
        while True:
            await how(self)
            await asyncio.sleep(1.0)


async def numbers_beyond_reach(liar: Liar) -> None:
    """Terms and counters after which none could follow."""
    await liar.claim(FAR, PlanVersion(term=FAR, counter=FAR))
    peers = [member.transport.peer_id for member in liar.swarm.members]
    await liar.publish(liar.whole(*peers, version=PlanVersion(term=FAR, counter=FAR), rate=1.0))


async def leads_and_does_nothing(liar: Liar) -> None:
    await liar.claim(liar.term_max, PlanVersion(term=liar.term_max))


async def claims_versions(liar: Liar) -> None:
    """Only a follower, that says it adopted plans which nobody made."""
    await liar.directory.publish(
        replace(liar.record, plan_version=PlanVersion(term=liar.term_max, counter=liar.term_max))
    )


async def invalid_plans(liar: Liar) -> None:
    await liar.claim(liar.term_max, PlanVersion())
    peer = liar.swarm.members[0].transport.peer_id
    plan = liar.whole(peer, version=PlanVersion(term=liar.term_max), rate=1.0)
    await liar.publish(replace(plan, assignments=(Make.span(peer, 0, 7),)))


async def impossible_plans(liar: Liar) -> None:
    """More flow than anybody announced."""
    await liar.claim(liar.term_max, PlanVersion())
    peers = [member.transport.peer_id for member in liar.swarm.members]
    await liar.publish(liar.whole(*peers, version=PlanVersion(term=liar.term_max), rate=1e6))


async def poor_plans(liar: Liar) -> None:
    """One peer shall do everything, the others nothing."""
    await liar.claim(liar.term_max, PlanVersion())
    peer = liar.swarm.members[0].transport.peer_id
    await liar.publish(liar.whole(peer, version=PlanVersion(term=liar.term_max), rate=10.0))


async def plans_on_ghosts(liar: Liar) -> None:
    """Peers that do not exist serve everything."""
    await liar.claim(liar.term_max, PlanVersion())
    await liar.publish(liar.whole("ghost", version=PlanVersion(term=liar.term_max), rate=1e4))


LIES = [
    numbers_beyond_reach,
    leads_and_does_nothing,
    claims_versions,
    invalid_plans,
    impossible_plans,
    poor_plans,
    plans_on_ghosts,
]


def served(swarm: Swarm) -> bool:
    """All honest peers serve by one honest plan."""
    names = {member.transport.peer_id for member in swarm.members}
    plan = swarm.members[0].plans.newest
    return (
        swarm.agreed()
        and plan is not None
        and plan.coordinator in names
        and len(plan.assignments) == len(names)
        and all(member.record.state is NodeState.SERVING for member in swarm.members)
    )


@pytest.mark.virtual(limit_s=2000)
@pytest.mark.parametrize("lie", LIES, ids=lambda lie: lie.__name__)
@pytest.mark.parametrize("from_the_start", [True, False], ids=["first", "later"])
async def test_a_liar_neither_blocks_elections_nor_plans(lie, from_the_start):
    swarm = Swarm(Make, HONEST)
    liar = Liar(swarm)
    lying = None
    if from_the_start:
        lying = asyncio.create_task(liar.lie(lie))
        await asyncio.sleep(20)
    async with swarm:
        if lying is None:
            await swarm.settle(lambda: served(swarm))
            lying = asyncio.create_task(liar.lie(lie))
            await asyncio.sleep(30)
        await swarm.settle(lambda: served(swarm), 150.0)
        # A plan that is needed is made, by another if need be, though somebody always lies.
        await swarm.kill((swarm.leaders() or swarm.members)[0])
        await swarm.settle(lambda: served(swarm), 150.0)
        for member in swarm.members:
            assert member.plans.version not in liar.heads
        lying.cancel()
        await asyncio.gather(lying, return_exceptions=True)


@pytest.mark.virtual(limit_s=4000)
async def test_identities_that_do_not_exist_do_not_hold_up_an_election():
    """They say that they have been here for ever, and would all try before most others."""
    swarm = Swarm(Make, HONEST, seed=2)
    async with swarm:
        await swarm.settle(lambda: served(swarm))
        await asyncio.sleep(400)
        crowd = [Liar(swarm) for _ in range(200)]
        for liar in crowd:
            await liar.directory.publish(replace(liar.record, joined_unix_s=0.0))
        (leader,) = swarm.leaders()
        await swarm.kill(leader)
        took_s = await swarm.settle(lambda: len(swarm.leaders()) == 1, 150.0)
        assert took_s < 25.0  # as without them: one of two tries at once


def well_led(swarm: Swarm) -> bool:
    """All honest peers follow one honest plan that uses them all, whoever else is in it."""
    names = {member.transport.peer_id for member in swarm.members}
    plan = swarm.members[0].plans.newest
    return (
        len({member.plans.version for member in swarm.members}) == 1
        and plan is not None
        and plan.coordinator in names
        and names <= {a.peer_id for a in plan.assignments}
    )


class Selective(Liar):
    """Announces more than the others, answers all of them, and the coordinator once in a while."""

    def __init__(self, swarm: Swarm) -> None:
        super().__init__(swarm)
        self.record = replace(
            Make.record(self.me, 0, 8, rate=1000.0, memory=1000), joined_unix_s=0.0
        )
        self.hides = False

    async def _answer(self, stream: Stream) -> None:
        leaders = {member.transport.peer_id for member in self.swarm.leaders()}
        while True:
            message = (await codec.read_frame(stream, limit_bytes=1 << 10)).message
            if self.hides and stream.remote_peer_id in leaders:
                raise NetworkError("not for you")
            match message:
                case Ping(nonce=nonce):
                    await codec.send_frame(stream, Pong(nonce=nonce))
                case WitnessRequest(peer_id=peer_id):
                    await codec.send_frame(stream, Witness(peer_id=peer_id, answers=True))

    async def live(self) -> None:
        """Hide from whoever leads for most of each two minutes."""
        await self.transport.serve(PLAN_PROTOCOL, self._answer)
        while True:
            for self.hides in (False, True, True, True):
                for _ in range(6):
                    await self.directory.publish(self.record)
                    await asyncio.sleep(5.0)


@pytest.mark.virtual(limit_s=2000)
async def test_a_peer_that_hides_from_the_coordinator_alone_deposes_nobody():
    swarm = Swarm(Make, HONEST)
    async with swarm:
        await swarm.settle(lambda: well_led(swarm))
        hiding = asyncio.create_task(Selective(swarm).live())
        (leader,) = swarm.leaders()
        for _ in range(600):
            await asyncio.sleep(1.0)
            assert swarm.leaders() == [leader]
        await swarm.settle(lambda: well_led(swarm))
        for member in swarm.members:
            assert not member.plans.counters["refused"]
        hiding.cancel()
        await asyncio.gather(hiding, return_exceptions=True)


@pytest.mark.virtual(limit_s=2000)
@pytest.mark.parametrize("plays_dead", [False, True], ids=["answers", "plays dead"])
async def test_an_author_cannot_leave_out_peers_by_calling_them_silent(plays_dead):
    """It leads with peers of its own, one of which has the bodies of its plans."""
    swarm = Swarm(Make, HONEST)
    liar, friend = Selective(swarm), Selective(swarm)
    lies: set[PlanVersion] = set()

    async def lead() -> None:
        friend.store = liar.store
        await friend.transport.serve(PLAN_PROTOCOL, friend.store._serve)
        if not plays_dead:
            await liar.store.serve()
        while True:
            version = PlanVersion(term=liar.term_max)
            await liar.claim(liar.term_max, NO_VERSION)
            await friend.directory.publish(replace(friend.record, plan_version=version))
            honest = tuple(member.transport.peer_id for member in swarm.members)
            plan = liar.whole(liar.me, friend.me, version=version, rate=100.0)
            lies.add(version)
            await liar.publish(replace(plan, silent=honest))
            await asyncio.sleep(20.0)

    async with swarm:
        await swarm.settle(lambda: well_led(swarm))
        lying = asyncio.create_task(lead())
        for _ in range(300):
            await asyncio.sleep(1.0)
            for member in swarm.members:
                assert member.plans.version not in lies
        if not plays_dead:
            await swarm.settle(lambda: well_led(swarm))
        lying.cancel()
        await asyncio.gather(lying, return_exceptions=True)
