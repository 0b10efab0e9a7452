"""Demand by the work of last stages, and what plans are made for then."""

from dataclasses import replace

import pytest

from coordinator.plans.demand import Demand, DemandConfig, planned_for, weight_at
from dht.messages.types import RECORD_BOUNDS, SINK, SOURCE, FlowEdge, NodeRecord, Plan, Problem
from tests.unit.coordinator.problems import model as toy
from tests.unit.coordinator.problems import node, plan_of, record, span, steady

PROBLEM = Problem(model=toy(4), nodes=tuple(node(p, steady(400, 4)) for p in "abc"))
PLAN = replace(
    plan_of(PROBLEM, [span("a", 0, 2), span("b", 2, 4), span("c", 2, 4)]),
    edges=(
        FlowEdge(tail=SOURCE, head="a", tokens_per_s=100.0),
        FlowEdge(tail="a", head="b", tokens_per_s=90.0),
        FlowEdge(tail="a", head="c", tokens_per_s=10.0),
        FlowEdge(tail="b", head=SINK, tokens_per_s=90.0),
        FlowEdge(tail="c", head=SINK, tokens_per_s=10.0),
    ),
    flow_tokens_per_s=100.0,
    estimate_tokens_per_s=80.0,
    answer_weight=0.1,
)


def records(**tokens: float) -> dict[str, NodeRecord]:
    """The peers, with what they say they sampled."""
    held = {"a": (0, 2), "b": (2, 4), "c": (2, 4)}
    return {
        peer: replace(record(peer, *spans, layers=4), answer_tokens=int(tokens.get(peer, 0)))
        for peer, spans in held.items()
    }


def measured(plan: Plan = PLAN, until_s: int = 3000, **tokens_per_s: float) -> Demand:
    """Demand after peers announced, every ten seconds, that they sampled at these rates."""
    demand = Demand()
    for at_s in range(0, until_s, 10):
        demand.look(records(**{p: r * at_s for p, r in tokens_per_s.items()}), plan, float(at_s))
    return demand


def test_a_new_swarm_counts_as_idle() -> None:
    assert Demand().answer_weight(None) == RECORD_BOUNDS.answer_weight_max == weight_at(0.0)


def test_a_coordinator_that_knows_too_little_keeps_the_plans_figure() -> None:
    young = measured(until_s=int(DemandConfig().known_after_s), b=30.0)
    assert young.tokens_per_s() is None
    assert young.answer_weight(PLAN) == PLAN.answer_weight


@pytest.mark.parametrize(
    ("rate", "weight"),
    [
        (0.0, RECORD_BOUNDS.answer_weight_max),
        (10.0, 0.75 * RECORD_BOUNDS.answer_weight_max),
        (60.0, 0.0),
    ],
)
def test_the_weight_falls_with_what_last_stages_sampled(rate: float, weight: float) -> None:
    demand = measured(b=rate)
    assert demand.tokens_per_s() == pytest.approx(rate, rel=0.02)
    assert demand.answer_weight(PLAN) == pytest.approx(weight, abs=0.003)


def test_small_changes_do_not_count() -> None:
    near = replace(PLAN, answer_weight=weight_at(10 / 80) + 0.9 * DemandConfig().step)
    assert measured(b=10.0).answer_weight(near) == near.answer_weight


def test_a_peer_that_invents_tokens_moves_the_figure_by_its_own_share() -> None:
    honest, lied = measured(b=10.0), measured(b=10.0, c=1e12)
    assert lied.tokens_per_s() == pytest.approx((honest.tokens_per_s() or 0) + 8.0, rel=0.02)
    leap = measured(b=10.0)
    leap.look(records(b=10.0 * 2990, c=float(1 << 49)), PLAN, 3000.0)
    assert (leap.tokens_per_s() or 0) < 10.0 + 8.0 + 0.1, "silence first does not help"


def test_who_is_no_last_stage_counts_for_nothing() -> None:
    assert measured(a=1e9).tokens_per_s() == 0.0


def test_what_a_peer_did_before_it_started_again_does_not_count_twice() -> None:
    demand = measured(b=10.0)
    before = demand.tokens_per_s() or 0.0
    again = {p: replace(r, joined_unix_s=r.joined_unix_s + 1) for p, r in records(b=1e6).items()}
    demand.look(again, PLAN, 3000.0)
    assert (demand.tokens_per_s() or 0.0) <= before


def test_what_a_plan_is_for_is_said_in_words() -> None:
    assert "full swarm" in planned_for(0.0)
    assert "idle swarm" in planned_for(RECORD_BOUNDS.answer_weight_max)
    assert "some load" in planned_for(RECORD_BOUNDS.answer_weight_max / 2)
