"""Records and plans of strangers, from the signed bytes to every place that reads them."""

import asyncio
import contextlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import pytest
from hypothesis import given

from client.health.app import Page, metrics_text
from client.health.served import ServedTally
from client.health.state import Probe, SeenPeer, SwarmSnapshot, build_state
from client.view.view import SwarmView, ViewConfig
from coordinator.evaluation.plan_check import check_shape
from coordinator.planning.solve import SolveRequest, solve_request
from coordinator.plans.announced_problem import announced_problem
from coordinator.plans.election.election import Election, ElectionView, step
from coordinator.plans.move_waits import MoveWaitConfig, why_wait
from coordinator.plans.review import falls_short, review
from coordinator.plans.transition import TransitionConfig, settled, usable_nodes, with_effects
from coordinator.policies.routing.balance import (
    Balance,
    BalanceConfig,
    Movable,
    load_of,
    reported,
    round_trips,
)
from coordinator.policies.routing.routes import Router
from coordinator.problem.from_records import problem_of
from coordinator.problem.model_pin import ModelPin
from dht.errors import UserError
from dht.messages import codec
from dht.messages.types import (
    LeaseRecord,
    LinksRecord,
    ModelSpec,
    NodeRecord,
    Plan,
    PlanHead,
    PlanVersion,
    fits,
)
from dht.process.supervision import Supervisor
from dht.records.directory import RECORD_TYPES, Directory, RecordKind, record_key
from dht.records.signed import RecordError, RecordGuard, sign_record
from dht.transport.interface import Transport
from tests.choices import Choices, choices
from tests.examples import examples
from tests.fuzz.laws import lawful
from tests.fuzz.values import PEOPLE, damaged_bytes, damaged_message, value_of
from tests.unit.coordinator.problems import model, plan_of, record

pytestmark = pytest.mark.property
NOW_S = 1_700_000_000.0
MODEL = model(8, kv_bytes=1)
PIN = ModelPin(fingerprint=MODEL.fingerprint)
KEYS = {kind: record_key("net", MODEL.key, kind) for kind in RecordKind}
PAGE = Page(dict)
NAMES = [each.peer_id for each in PEOPLE]

DRAWN = choices(1500)


def _model(drawn: Choices) -> ModelSpec:
    match drawn.below(4):
        case 0:
            return replace(MODEL, layers=1024)
        case 1:
            said: ModelSpec = value_of(ModelSpec, drawn)
            return replace(said, root=MODEL.root, name=MODEL.name)
        case 2:
            return value_of(ModelSpec, drawn)
    return MODEL


def _version(drawn: Choices) -> PlanVersion:
    return value_of(PlanVersion, drawn) if drawn.yes() else PlanVersion(term=1 + drawn.below(200))


MADE = {ModelSpec: _model, PlanVersion: _version}


def node(name: str, drawn: Choices) -> NodeRecord:
    """What a peer may announce: anything, or something usual with some odd words."""
    said: NodeRecord = value_of(NodeRecord, drawn, MADE)
    if drawn.below(3) == 0:
        return replace(said, peer_id=name)
    start = drawn.below(8)
    usual = replace(
        record(name, start, start + drawn.below(9 - start), rates=(10.0,) * 8, layers=8),
        model=MODEL,
        memory_bytes=10_000,
        kv_tokens_free=1000,
        joined_unix_s=NOW_S - 100 + drawn.below(200),
    )
    odd = [drawn.one_of(NodeRecord.__slots__[1:]) for _ in range(drawn.below(4))]
    return replace(usual, **{field: getattr(said, field) for field in odd})


@dataclass(slots=True)
class Store:
    """The DHT's part of a transport: what a guard let in."""

    guard: RecordGuard
    peer_id: str = NAMES[0]

    def now(self) -> float:
        return NOW_S

    async def get(self, key: str, *, latest: bool = False) -> Mapping[str, bytes]:
        del latest
        return {author: each.payload for author, each in self.guard.living(key, NOW_S).items()}


@dataclass(slots=True)
class Seen:
    """What a reader of the records makes of them."""

    directory: Directory
    nodes: dict[str, NodeRecord]
    links: dict[str, LinksRecord]
    leases: dict[str, LeaseRecord]
    heads: dict[str, PlanHead]


async def read(store: Store) -> Seen:
    directory = Directory(cast(Transport, store), "net", MODEL.key)
    return Seen(
        directory=directory,
        nodes=await directory.nodes(),
        links=await directory.links(),
        leases=await directory.leases(),
        heads=await directory.plan_heads(),
    )


def payload_of(kind: RecordKind, name: str, drawn: Choices) -> bytes:
    """A record's bytes by ``name``: mostly whole and its own, else damaged."""
    if drawn.below(8) == 0:
        return damaged_message(RECORD_TYPES[kind], drawn)[: codec.FRAME_BOUNDS.record_bytes_max]
    if kind is RecordKind.NODES:
        said: Any = node(name, drawn)
    else:
        said = value_of(RECORD_TYPES[kind], drawn, MADE)
        if drawn.below(8):
            said = replace(said, peer_id=name)
    return codec.encode(said)[: codec.FRAME_BOUNDS.record_bytes_max]


def swarm(drawn: Choices) -> Seen:
    """The records of four strangers, signed, brought, let in and read."""
    store = Store(guard=RecordGuard())
    for each in PEOPLE:
        for kind, key in KEYS.items():
            if kind is not RecordKind.NODES and drawn.yes():
                continue
            signed = sign_record(each, key, payload_of(kind, each.peer_id, drawn), NOW_S + 5)
            store.guard.admit(signed, now_unix_s=NOW_S, storer=each.peer_id)
    return asyncio.run(read(store))


def plan_over(seen: Seen, drawn: Choices) -> Plan:
    """A plan over the peers that are seen: a right one, that with odd words, or anything."""
    said: Plan = value_of(Plan, drawn, MADE)
    problem = problem_of(MODEL, usable_nodes(seen.nodes, MODEL, frozenset()), seen.links)
    spans = [
        each.current
        for each in problem.nodes
        if each.current and fits(MODEL, each, each.current.start, each.current.end)
    ]
    if not spans or drawn.below(4) == 0:
        return said
    right = plan_of(problem, spans)
    odd = [drawn.one_of(Plan.__slots__) for _ in range(drawn.below(3))]
    return replace(right, **{field: getattr(said, field) for field in odd})


@examples(25)
@given(DRAWN)
def test_bytes_are_a_record_or_are_refused(drawn: Choices) -> None:
    kind = drawn.one_of(list(RecordKind))
    author = drawn.one_of(PEOPLE)
    payload = payload_of(kind, author.peer_id, drawn)
    key = drawn.one_of([KEYS[kind], "", "a/b/c", "n//nodes", "𝕏/m/lease"])
    expires_s = NOW_S + drawn.one_of([-1.0, 0.0, 1.0, 119.0, 1e4, 9e9])
    try:
        signed = sign_record(author, key, payload, expires_s)
    except RecordError:
        return
    sent = signed if drawn.yes() else damaged_bytes(signed, drawn)

    def brought() -> None:
        guard = RecordGuard()
        admitted = guard.admit(sent, now_unix_s=NOW_S, storer="s")
        assert admitted.payload == payload, "signed, so unchanged"
        assert len(guard) == 1
        asyncio.run(read(Store(guard=guard)))

    lawful(brought, RecordError)


@examples(25)
@given(DRAWN)
def test_planner_and_routes_take_whatever_is_announced(drawn: Choices) -> None:
    seen = swarm(drawn)
    me = drawn.one_of(NAMES)
    lawful(lambda: asyncio.run(announced_problem(seen.directory, PIN)), UserError)
    lawful(lambda: _elect(seen, me), ())
    mine = seen.nodes.get(me)
    if mine is not None:
        lawful(lambda: _balance(seen, mine), ())


@examples(5)
@given(DRAWN)
def test_there_is_a_plan_or_a_reason_whatever_is_announced(drawn: Choices) -> None:
    seen = swarm(drawn)
    with contextlib.suppress(UserError):
        problem, _ = asyncio.run(announced_problem(seen.directory, PIN))
        spent = iter((0.0, 0.5, 0.9))
        solve_request(
            SolveRequest(
                problem=problem,
                version=PlanVersion(),
                coordinator="a",
                seed=1,
                time_limit_s=1.0,
                now_unix_s=NOW_S,
                settled=frozenset(name for name in NAMES if drawn.yes()),
            ),
            lambda: next(spent, 1.0),
        )


def _elect(seen: Seen, me: str) -> None:
    state = Election(peer_id=me)
    view = ElectionView(leases=seen.leases, candidates=frozenset(seen.nodes))
    for now_s in (0.0, 20.0, 40.0):
        state, _ = step(state, view, now_s)


def _balance(seen: Seen, mine: NodeRecord) -> None:
    me = mine.peer_id
    others = {
        p: load_of(r, beside=mine)
        for p, r in seen.nodes.items()
        if p != me and r.model.serves_with(mine.model)
    }
    here = Movable(
        session="s" * 8,
        start=mine.start,
        end=mine.end,
        route=frozenset({me}),
        neighbours=frozenset(others),
        kv_tokens=100,
        left_tokens=90,
        ran_tokens=10,
        moved_s=math.inf,
    )
    balance = Balance(me=me, config=BalanceConfig(evens=True))
    for now_s in (0.0, 30.0, 60.0):
        balance.step(
            now_s, load_of(mine), others, [here], [here.session], round_trips(reported(seen.links))
        )


@examples(25)
@given(DRAWN)
def test_a_view_draws_routes_of_whatever_is_announced(drawn: Choices) -> None:
    seen = swarm(drawn)
    plan = plan_over(seen, drawn)
    kv_tokens = drawn.one_of([1, 500, 1 << 22])
    peer = drawn.one_of(NAMES)

    def draw() -> None:
        view = SwarmView(ViewConfig(avoid_s=10.0), pin=PIN)
        view.take_nodes(seen.nodes)
        if not check_shape(plan):
            view.take_plans({plan.version: plan})
        for now_s in (0.0, 1.0, 2.0):
            route = view.draw((), frozenset(), kv_tokens, now_s)
            view.answering_route(now_s)
            if isinstance(route, tuple):
                assert view.spec is not None
                assert [s.start for s in route] == [0, *(s.end for s in route[:-1])]
                assert route[-1].end == view.spec.layers
                view.swap(route, route[0].peer_id, peer, kv_tokens, now_s)
                view.draw(route, frozenset({route[-1].peer_id}), kv_tokens, now_s)
                view.avoid(route[0].peer_id, None, 0.0, now_s)

    lawful(draw, ())


@examples(25)
@given(DRAWN)
def test_a_strangers_plan_is_reviewed(drawn: Choices) -> None:
    seen = swarm(drawn)
    plan = codec.decode(codec.encode(plan_over(seen, drawn)))
    running = plan_over(seen, drawn) if drawn.yes() else None
    if check_shape(plan):
        return
    gone = frozenset(drawn.one_of(NAMES) for _ in range(drawn.below(3)))
    verdict = review(
        plan,
        seen.nodes,
        seen.links,
        running=None if running is None or check_shape(running) else running,
        gone=gone,
        now_unix_s=NOW_S,
    )
    assert len(verdict.reason) < 1 << 16
    Router(plan).next_route(seen.nodes)
    usable = usable_nodes(seen.nodes, plan.model, gone)
    stay = settled(usable, NOW_S, TransitionConfig())
    falls_short(plan, usable, {p: usable[p] for p in stay}, seen.links)
    with_effects(plan, usable)
    for mine in seen.nodes.values():
        why_wait(plan, mine, seen.nodes, seen.nodes, seen.nodes, NOW_S, MoveWaitConfig())


@examples(25)
@given(DRAWN)
def test_the_health_page_shows_whatever_is_announced(drawn: Choices) -> None:
    seen = swarm(drawn)
    plan = plan_over(seen, drawn)
    misses = drawn.below(4)
    lies = drawn.one_of([(), (NOW_S - 30, NOW_S - 20)])
    peers = tuple(
        SeenPeer(
            record=each,
            seen_unix_s=NOW_S,
            answered_unix_s=NOW_S,
            rtt_s=0.01,
            misses=misses,
            refused_unix_s=lies,
        )
        for each in seen.nodes.values()
    )
    view = SwarmView(ViewConfig(avoid_s=10.0), pin=PIN)
    view.take_nodes(seen.nodes)
    route = view.draw((), frozenset(), 1, 0.0)

    def show() -> None:
        state = build_state(
            SwarmSnapshot(
                model_name="toy",
                now_unix_s=NOW_S,
                model=view.spec,
                peers=peers,
                links=tuple(seen.links.values()),
                leases=tuple(seen.leases.values()),
                plan=None if check_shape(plan) else plan,
                probes=(Probe(at_unix_s=NOW_S - 1, reason="no answer"),),
                route=route if isinstance(route, tuple) else (),
            )
        )
        text = json.dumps(state, allow_nan=False)
        html = PAGE.render(state)
        metrics = metrics_text(state, Supervisor())
        assert len(text) + len(html) + len(metrics) < 1 << 20
        assert "<script>" not in html
        assert html.encode()
        tally = ServedTally()
        tally.look(seen.nodes.values(), NOW_S - 10)
        served = tally.look(seen.nodes.values(), NOW_S)
        assert served.tokens < 1 << 40

    lawful(show, ())
