"""Plans held against the records that a peer sees."""

from dataclasses import replace

import pytest

from coordinator.evaluation.plan_check import check_shape
from coordinator.planning.heuristics.heuristics import greedy
from coordinator.planning.placement import Placement, make_plan
from coordinator.plans.review import Opinion, known_part, review
from coordinator.problem.from_records import problem_of
from dht.messages.types import Link, LinksRecord, PlanVersion

NOW_S = 1e6


@pytest.fixture
def nodes(make):
    return {name: make.record(name, memory=1000) for name in "abc"}


@pytest.fixture
def judge(make, nodes):
    def judged(plan, *, seen=None, running=None, gone="", changed="", links=None, now_s=NOW_S):
        verdict = review(
            plan,
            nodes if seen is None else seen,
            links or {},
            running=running,
            gone=frozenset(gone),
            changed=frozenset(changed),
            now_unix_s=now_s,
        )
        return verdict.opinion

    return judged


@pytest.fixture
def plan_of(make, nodes):
    def planned(*spans, nodes=nodes):
        return make_plan(
            problem_of(make.model, nodes, {}),
            Placement(assignments=spans, flow_tokens_per_s=0.0, planner="test"),
            version=PlanVersion(term=1, counter=1),
            coordinator="a",
            solve_s=0.0,
            now_unix_s=NOW_S,
        )

    return planned


@pytest.fixture
def good(make, nodes, plan_of):
    return plan_of(*greedy(problem_of(make.model, nodes, {})))


def test_the_greedy_plan_is_fine(judge, good):
    assert judge(good) is Opinion.FINE


def test_layers_that_do_not_fit_are_impossible(judge, good, nodes):
    small = {name: replace(record, memory_bytes=100) for name, record in nodes.items()}
    assert judge(good, seen=small) is Opinion.IMPOSSIBLE


def test_more_than_a_peer_can_carry_is_impossible(judge, good):
    boasting = replace(
        good, edges=tuple(replace(e, tokens_per_s=2 * e.tokens_per_s) for e in good.edges)
    )
    assert judge(boasting) is Opinion.IMPOSSIBLE


def test_more_than_a_link_can_carry_is_impossible(make, judge, plan_of):
    plan = plan_of(make.span("a", 0, 4), make.span("b", 4, 8))
    bandwidth = plan.flow_tokens_per_s * make.model.activation_bytes / 5
    link = Link(
        source="a", target="b", bandwidth_bytes_per_s=bandwidth, rtt_s=0.0, measured_unix_s=0.0
    )
    links = {"b": LinksRecord(peer_id="b", links=(link,))}
    assert judge(plan, links=links) is Opinion.IMPOSSIBLE
    # What somebody says of a link that does not end at him is no measurement.
    assert judge(plan, links={"c": LinksRecord(peer_id="c", links=(link,))}) is not (
        Opinion.IMPOSSIBLE
    )


def test_waves_that_move_somebody_twice_or_nobody_are_impossible(judge, good):
    for waves in ((("a",), ("a",)), (("z",),)):
        assert judge(replace(good, waves=waves)) is Opinion.IMPOSSIBLE


def test_a_plan_on_unknown_peers_waits(judge, good, nodes):
    assert judge(good, seen={}) is Opinion.UNSURE
    assert judge(good, seen=nodes) is Opinion.FINE


def test_worse_than_the_greedy_placement_is_refused(make, judge, plan_of, nodes):
    slow = plan_of(make.span("a", 0, 8))
    assert judge(slow) is Opinion.WORSE
    # Peers that do not answer, or that joined just now, are not held against the plan.
    assert judge(slow, gone="bc") is Opinion.FINE
    joined = {p: replace(r, joined_unix_s=NOW_S if p != "a" else 0.0) for p, r in nodes.items()}
    assert judge(slow, seen=joined) is Opinion.FINE


def test_whom_the_author_calls_silent_is_not_held_against_the_plan(make, judge, plan_of):
    slow = plan_of(make.span("a", 0, 8))
    assert judge(replace(slow, silent=("b",))) is Opinion.WORSE
    assert judge(replace(slow, silent=("b", "c"))) is Opinion.FINE
    assert check_shape(replace(slow, silent=("a",)))


def test_a_peer_that_takes_its_word_back_is_not_held_against_the_plan(judge, good, nodes):
    """It offered more when the plan was made, and less a moment later."""
    poor = nodes | {"b": replace(nodes["b"], tokens_per_s=(1.0,) * 8, memory_bytes=10)}
    assert judge(good, seen=poor) is Opinion.IMPOSSIBLE
    assert judge(good, seen=poor, changed="b") is Opinion.FINE


def test_flow_over_unknown_peers_does_not_count(make, judge, plan_of, nodes):
    more = nodes | {name: make.record(name, memory=1000) for name in "xyz"}
    plan = plan_of(*(make.span(name, 0, 8) for name in "abxyz"), nodes=more)
    assert judge(plan, seen=more) is Opinion.FINE
    assert judge(plan) is Opinion.UNSURE


def test_the_running_placement_published_anew_is_fine_unless_its_flow_is_wrong(
    make, judge, plan_of
):
    slow = plan_of(make.span("a", 0, 8))
    assert judge(replace(slow, coordinator="b"), running=slow) is Opinion.FINE
    share = 0.4
    diverted = replace(
        slow,
        edges=tuple(replace(e, tokens_per_s=share * e.tokens_per_s) for e in slow.edges),
        flow_tokens_per_s=share * slow.flow_tokens_per_s,
    )
    assert judge(diverted, running=slow) is Opinion.WORSE


def test_who_stays_where_the_running_plan_put_him_is_no_poor_choice(make, judge, plan_of, nodes):
    """Also while he, or another, still serves what a plan before that gave him."""
    running = plan_of(make.span("a", 0, 8), make.span("b", 0, 4))
    late = nodes | {"b": make.record("b", 2, 8, memory=1000)}
    with_joiner = plan_of(*running.assignments, make.span("c", 0, 4))
    assert judge(with_joiner, seen=late) is Opinion.WORSE
    assert judge(with_joiner, seen=late, running=running) is Opinion.FINE


def test_depth_counts_not_flow_alone(make, judge, plan_of, nodes):
    """Two chains of one flow: the deeper one lets every token wait on a slow ring, and is worse."""
    more = {name: make.record(name, memory=1000, rate=400.0) for name in "abcdefgh"}
    slow = tuple(
        Link(source=s, target=t, bandwidth_bytes_per_s=1e9, rtt_s=2.0, measured_unix_s=0.0)
        for s in more
        for t in more
        if s != t
    )
    links = {
        name: LinksRecord(peer_id=name, links=tuple(k for k in slow if k.target == name))
        for name in more
    }
    kv = replace(make.model, kv_bytes_per_token_layer=1)
    more = {name: replace(record, model=kv, memory_bytes=1600) for name, record in more.items()}
    deep = plan_of(*(make.span(n, i, i + 1) for i, n in enumerate("abcdefgh")), nodes=more)
    wide = plan_of(*(make.span(n, 0, 8) for n in "abcdefgh"), nodes=more)
    assert deep.flow_tokens_per_s == pytest.approx(wide.flow_tokens_per_s)
    assert judge(wide, seen=more, links=links) is Opinion.FINE
    assert judge(deep, seen=more, links=links) is Opinion.WORSE


def test_only_flow_that_known_peers_pass_on_to_known_peers_counts(make):
    spans = [make.span("a", 0, 4), make.span("x", 0, 4), make.span("b", 4, 8), make.span("y", 4, 8)]
    edges = [
        make.edge("source", "a", 6.0),
        make.edge("source", "x", 4.0),
        make.edge("a", "b", 3.0),
        make.edge("a", "y", 3.0),
        make.edge("x", "b", 4.0),
        make.edge("b", "sink", 7.0),
        make.edge("y", "sink", 3.0),
    ]
    assert known_part(edges, spans, frozenset("abxy")) == tuple(edges)
    rest = {(e.tail, e.head): e.tokens_per_s for e in known_part(edges, spans, frozenset("ab"))}
    # Half of what a takes goes on to y, and four sevenths of what b takes came over x.
    assert rest == pytest.approx({("source", "a"): 3.0, ("a", "b"): 3.0, ("b", "sink"): 3.0})
    assert known_part(edges, spans, frozenset("a")) == ()
