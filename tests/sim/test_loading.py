"""While a peer loads layers, those who wait for them are told so."""

import asyncio
import io
from dataclasses import replace
from typing import Any

import pytest

from coordinator.plans.store import PlanStore
from dht.errors import UserError
from dht.messages.types import Assignment, NodeState, Plan, PlanVersion
from dht.records.directory import Directory
from node.owner.reporter import Reporter
from node.peer.announcer import Announcer
from node.peer.plan_follower import UNTOLD_S, FollowConfig, PeerCore, PlanFollower
from tests.sim.paper_swarm import NETWORK, SPEC, PaperEngine, PaperPeer, answer_of, paper_swarm
from tests.sim.test_self_help import LoadingEngine

LOAD_S = 20.0
PROMPT = (5, 6, 7)


class SlowEngine(LoadingEngine):
    """Loads slowly enough for those who wait to hear of it."""

    def __init__(self, peer_id: str, start: int, end: int, **named: Any) -> None:
        super().__init__(peer_id)

    async def load(self, start: int, end: int, progress: Any) -> int:
        await asyncio.sleep(LOAD_S)
        return 1


def follower_of(peer: PaperPeer, out: io.StringIO | None = None) -> tuple[PlanFollower, Announcer]:
    record = replace(peer.record(), state=NodeState.WAITING, start=0, end=0, memory_bytes=1 << 30)
    shared: Any = {
        "transport": peer.transport,
        "directory": Directory(peer.transport, NETWORK, SPEC.key),
        "stage": peer.stage,
    }
    announcer = Announcer(**shared, record=record, every_s=15.0)
    core = PeerCore(
        **shared,
        engine=peer.engine,  # type: ignore[arg-type]
        coordinator=None,  # type: ignore[arg-type]  # it is asked where nobody leads
        plans=PlanStore(peer.transport, shared["directory"]),
        reporter=Reporter(json_log=False, out=out or io.StringIO()),
    )
    return PlanFollower(core, announcer, FollowConfig()), announcer


def plan_of(counter: int, *assignments: Assignment) -> Plan:
    return Plan(
        version=PlanVersion(term=1, counter=counter),
        coordinator="c",
        model=SPEC,
        assignments=assignments,
        edges=(),
        flow_tokens_per_s=1.0,
        bound_tokens_per_s=1.0,
        planner="test",
        solve_s=0.0,
        created_unix_s=0.0,
    )


@pytest.mark.virtual(limit_s=600)
async def test_who_waits_is_told_what_is_being_loaded_and_what_nobody_holds() -> None:
    said: list[str] = []
    async with paper_swarm((0, 2)) as swarm, swarm.client(on_status=said.append) as client:
        swarm.engine_class = SlowEngine
        loader = await swarm.add(0, 0)
        loader.tasks[1].cancel()  # its announcer tells of it instead
        follower, announcer = follower_of(loader)
        loader.tasks.append(asyncio.create_task(announcer.run()))
        swarm.engine_class = PaperEngine

        running = asyncio.create_task(client.generate(PROMPT, max_new_tokens=4))
        await asyncio.sleep(5)
        mine = Assignment(peer_id=loader.peer_id, start=4, end=8)
        following = asyncio.create_task(follower.enter(plan_of(1, mine)))
        await asyncio.sleep(10)
        assert [line for line in said if line.startswith("waiting")] == [
            "waiting: layers 2-7 are held by nobody that can be reached",
            "waiting: layers 2-3 are held by nobody that can be reached;"
            " layers 4-7 are being loaded by 1 peer",
        ]
        await following
        await swarm.add(2, 4)
        assert (await running).token_ids == answer_of(PROMPT, 4)


@pytest.mark.virtual(limit_s=60)
async def test_layers_of_a_plan_that_is_over_are_not_said_to_be_loaded() -> None:
    async with paper_swarm() as swarm:
        swarm.engine_class = SlowEngine
        follower, announcer = follower_of(await swarm.add(0, 0))
        mine = Assignment(peer_id=announcer.record.peer_id, start=4, end=8)
        following = asyncio.create_task(follower.enter(plan_of(1, mine)))
        await asyncio.sleep(0.5)
        record = announcer.record
        assert (record.state, record.start, record.end) == (NodeState.LOADING, 4, 8)
        following.cancel()
        await follower.enter(plan_of(2))
        record = announcer.record
        assert (record.state, record.start, record.end) == (NodeState.WAITING, 0, 0)


@pytest.mark.virtual(limit_s=60)
@pytest.mark.parametrize("is_local", [True, False])
async def test_files_of_a_local_directory_are_not_said_to_be_fetched(is_local: bool) -> None:
    async with paper_swarm() as swarm:
        swarm.engine_class = SlowEngine
        peer, out = await swarm.add(0, 0), io.StringIO()
        peer.engine.is_local = is_local
        follower, announcer = follower_of(peer, out)
        mine = Assignment(peer_id=announcer.record.peer_id, start=4, end=8)
        await follower.enter(plan_of(1, mine))
        fetching = [] if is_local else ["Fetching layers 4-7 …"]
        assert out.getvalue().splitlines()[:-1] == [*fetching, "Loading layers 4-7 …"]


@pytest.mark.virtual(limit_s=120)
async def test_who_may_not_give_up_layers_says_so_once_and_serves_on() -> None:
    async with paper_swarm((4, 8)) as swarm:
        swarm.engine_class = SlowEngine
        peer, out = await swarm.add(0, 0), io.StringIO()
        peer.engine.is_local = True
        follower, announcer = follower_of(peer, out)
        announcer.set(NodeState.SERVING, 0, 4, PlanVersion(term=0, counter=0))
        mine = Assignment(peer_id=peer.peer_id, start=2, end=6)
        other = Assignment(peer_id=swarm.peers[0].peer_id, start=4, end=8)
        following = asyncio.create_task(follower.enter(plan_of(1, mine, other)))
        await asyncio.sleep(UNTOLD_S - 1)
        assert not out.getvalue()
        await asyncio.sleep(60)
        assert out.getvalue().splitlines() == [
            "The plan has layers 2-5 for this peer; it goes on serving layers 0-3 for"
            " now: nobody else has shown to hold layer 0"
        ]
        following.cancel()


@pytest.mark.virtual(limit_s=120)
async def test_who_serves_goes_on_where_the_files_of_other_layers_are_gone() -> None:
    """What is loaded needs no file; its owner is told, and the peer does not end."""

    class Emptied(SlowEngine):
        async def fetch(self, start: int, end: int, progress: Any) -> None:
            raise UserError("model.safetensors cannot be read: No such file or directory")

    async with paper_swarm((0, 8)) as swarm:
        swarm.engine_class = Emptied
        peer, out = await swarm.add(0, 0), io.StringIO()
        follower, announcer = follower_of(peer, out)
        announcer.set(NodeState.SERVING, 0, 4, PlanVersion(term=0, counter=0))
        mine = Assignment(peer_id=peer.peer_id, start=2, end=6)
        other = Assignment(peer_id=swarm.peers[0].peer_id, start=0, end=8)
        for peer.engine.is_local in (True, False):
            await follower.enter(plan_of(1, mine, other))
            record = announcer.record
            assert (record.state, record.start, record.end) == (NodeState.SERVING, 0, 4)
        assert out.getvalue().splitlines()[0] == (
            "The plan has layers 2-5 for this peer; it goes on serving layers 0-3 for now:"
            " model.safetensors cannot be read: No such file or directory"
        )
        announcer.set(NodeState.WAITING, 0, 0, PlanVersion(term=0, counter=0))
        with pytest.raises(UserError, match="cannot be read"):
            await follower.enter(plan_of(2, mine, other))
