"""Bounds, cells of many peers, and all planners on the same problems."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given

from bench.planner.planners import PLANNERS, Effort
from coordinator.evaluation.max_flow import solve_flow, upper_bound
from coordinator.evaluation.plan_check import check_plan, check_shape
from coordinator.planning.heuristics.peer_cells import cells
from coordinator.planning.placement import best_placement, make_plan
from coordinator.problem.service import service_from_rates
from dht.messages.types import PlanVersion, Problem
from tests.examples import examples
from tests.unit.coordinator.helix import problem_of, published
from tests.unit.coordinator.problems import ends_after, model, node, problems, steady

QUICK = ("petals", "swarm", "separate", "cp-sat")


def many(count: int) -> Problem:
    """Peers of three sorts, with room for 2, 4 and 8 of 24 layers."""
    nodes = [
        node(f"p{index:03}", steady(100.0 * (1 + index % 3), 2 << index % 3))
        for index in range(count)
    ]
    return Problem(model=model(24), nodes=tuple(nodes))


def test_the_bound_of_single24() -> None:
    problem = problem_of("single24", "70b")
    assert upper_bound(problem) == pytest.approx(2045.64, rel=1e-4)


@pytest.mark.parametrize("cluster", ["single24", "geo24", "het42"])
def test_published_flows_are_below_the_bound(cluster: str) -> None:
    problem = problem_of(cluster, "70b")
    flow = solve_flow(problem, published(cluster, "70b", "helix")).flow_tokens_per_s
    assert flow < upper_bound(problem)


def test_cells_share_out_all_peers_and_each_holds_the_model() -> None:
    problem = many(130)
    parts = cells(problem)
    assert len(parts) >= 4
    names = [peer.peer_id for part in parts for peer in part.nodes]
    assert sorted(names) == sorted(peer.peer_id for peer in problem.nodes)
    for part in parts:
        assert sum(len(peer.tokens_per_s) for peer in part.nodes) >= 24


def test_a_cluster_that_cannot_be_cut_stays_whole() -> None:
    problem = Problem(model=model(100), nodes=tuple(node(f"p{i}", [1.0]) for i in range(110)))
    (part,) = cells(problem)
    assert len(part.nodes) == 110


def test_many_peers_are_planned_in_cells_and_the_plan_is_sound() -> None:
    problem = many(70)
    service = service_from_rates(problem)
    best = best_placement(problem, time_limit_s=1.0, seed=0, spent=ends_after(60), service=service)
    plan = make_plan(
        problem, best, version=PlanVersion(), coordinator="a", solve_s=0.0, now_unix_s=0.0
    )
    assert check_shape(plan) == []
    assert plan.flow_tokens_per_s > 0.3 * upper_bound(problem)


@examples(10)
@given(problems(peers_max=4, layers_max=4))
def test_every_planner_passes_the_checker(problem: Problem) -> None:
    service = service_from_rates(problem)
    for name in QUICK:
        found = PLANNERS[name](problem, service, Effort(time_limit_s=0.3))
        if found is None:
            continue
        plan = make_plan(
            problem, found, version=PlanVersion(), coordinator="a", solve_s=0.0, now_unix_s=0.0
        )
        assert check_plan(plan, problem) == [], name


def test_one_more_peer_never_costs_more_than_a_tenth() -> None:
    """The search is no proof: with another peer it may end elsewhere, but not far below."""
    full = many(12)
    values = []
    for count in (8, 10, 12):
        problem = replace(full, nodes=full.nodes[:count])
        found = best_placement(
            problem,
            time_limit_s=1.0,
            seed=0,
            spent=ends_after(60),
            service=service_from_rates(problem),
        )
        values.append(found.value)
    assert all(after >= 0.9 * before for before, after in pairwise(values))
