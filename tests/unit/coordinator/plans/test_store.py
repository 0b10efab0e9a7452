"""Plans come from strangers: reading one keeps nobody waiting."""

import asyncio
import random
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from coordinator.plans import store
from coordinator.plans.followed import FollowedPlans
from coordinator.plans.store import PlanStore
from coordinator.plans.versions import rank
from dht.errors import NetworkError
from dht.messages.codec import MalformedError
from dht.messages.types import (
    SINK,
    SOURCE,
    Assignment,
    FlowEdge,
    Plan,
    PlanHead,
    PlanVersion,
)
from dht.records.directory import Directory
from testing.network import MemoryNetwork
from tests.unit.records import record_of


def test_a_plan_is_read_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have 8 MiB; 118 kB with 4,096 peers that hold all layers took 0.12 s."""
    read_in: list[threading.Thread] = []

    def decode(*_: object) -> None:
        read_in.append(threading.current_thread())
        raise MalformedError("no plan")

    monkeypatch.setattr(store, "decode_plan", decode)
    transport, directory = SimpleNamespace(peer_id="me"), SimpleNamespace(model_key="m")
    head = PlanHead(peer_id="author", version=PlanVersion(term=1), sha256="0" * 64, size_bytes=1)

    async def take() -> None:
        plans = PlanStore(cast(Any, transport), cast(Any, directory))
        assert not await plans._take(head, b"x")
        assert plans.counters["refused"] == 1

    asyncio.run(take())
    assert [thread is threading.main_thread() for thread in read_in] == [False]


@pytest.mark.virtual(limit_s=100)
@pytest.mark.parametrize("is_client", [False, True])
async def test_whoever_has_a_plan_is_dialled_where_its_record_says_that_it_is(
    monkeypatch: pytest.MonkeyPatch, is_client: bool
) -> None:
    """Who is not connected to it yet would not reach it otherwise."""
    network = MemoryNetwork(random.Random(1))
    author, asker = network.transport(), network.transport()
    version = PlanVersion(term=1, counter=1, rank=rank(author.peer_id, 1))
    record = record_of(author.peer_id, 0, 8, addresses=author.addresses, plan_version=version)
    there = Directory(author, "net", record.model.key)
    await there.publish(record)
    head = PlanHead(peer_id=author.peer_id, version=version, sha256="0" * 64, size_bytes=1)
    await there.publish(head)
    asked: list[tuple[str, tuple[str, ...]]] = []

    async def open_stream(peer_id: str, _: str, *, addresses: tuple[str, ...] = ()) -> None:
        asked.append((peer_id, addresses))
        raise NetworkError("nobody is there")

    monkeypatch.setattr(asker, "open_stream", open_stream)
    directory = Directory(asker, "net", record.model.key)
    if is_client:
        await FollowedPlans(asker, directory).refresh(await directory.nodes())
    else:
        await PlanStore(asker, directory).refresh()
    assert asked == [(author.peer_id, author.addresses)]


@pytest.mark.virtual(limit_s=200)
async def test_who_gives_anothers_plan_as_its_own_keeps_nobody_from_that_plan() -> None:
    """Anybody can publish a head with the hash of another's plan. It is refused, as that plan is
    not its author's; the plan is still taken from who made it, once that one can be asked."""
    network = MemoryNetwork(random.Random(1))
    author, thief, asker = network.transport(), network.transport(), network.transport()
    record = record_of(author.peer_id, 0, 8, addresses=author.addresses)
    plan = Plan(
        version=PlanVersion(term=1, counter=1),
        coordinator=author.peer_id,
        model=record.model,
        assignments=(Assignment(peer_id=author.peer_id, start=0, end=8),),
        edges=tuple(
            FlowEdge(tail=tail, head=head, tokens_per_s=1.0)
            for tail, head in ((SOURCE, author.peer_id), (author.peer_id, SINK))
        ),
        flow_tokens_per_s=1.0,
        bound_tokens_per_s=1.0,
        planner="test",
        solve_s=0.0,
        created_unix_s=0.0,
    )
    of_author, of_thief = (
        PlanStore(each, Directory(each, "net", record.model.key)) for each in (author, thief)
    )
    head = await of_author.add(plan)
    taken = replace(head, peer_id=thief.peer_id, version=PlanVersion(term=1, counter=2))
    await of_thief._adopt(plan, taken, of_author._bodies[head.sha256])
    await of_thief.serve()
    for store_, said in ((of_author, head), (of_thief, taken)):
        await store_._directory.publish(said)
    plans = PlanStore(asker, Directory(asker, "net", record.model.key))
    await plans.refresh()
    assert plans.newest is None
    assert plans.counters["refused"] == 1
    await of_author.serve()  # it was busy until now
    await asyncio.sleep(2 * store.STORING.retry_max_s)
    for store_, said in ((of_author, head), (of_thief, taken)):
        await store_._directory.publish(said)
    await plans.refresh()
    assert plans.newest == plan
    assert plans.trust.distrusted(asyncio.get_running_loop().time()) == {thief.peer_id}
