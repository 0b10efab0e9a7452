"""The search over chains: what it makes with no time left, what it adds with time, and without a
service."""

import pytest

from coordinator.evaluation.plan_check import uncovered
from coordinator.search.chain_search import Judge, search
from dht.messages.types import SINK
from tests.unit.coordinator.helix import problem_of, service_of


def test_no_time_left_still_gives_chains() -> None:
    problem, service = problem_of("single24", "70b"), service_of("single24", "70b")
    judge = Judge(problem, service)
    late = search(judge, seed=0, spent=lambda: 1.0)
    assert late
    assert late[0].value > 0
    for found in late:
        for chain in found.chains:
            assert not uncovered(chain, problem.model.layers)


def test_moves_take_what_the_program_leaves() -> None:
    """By the clock of a fixed number of looks: best first, and no worse than without moves."""
    problem, service = problem_of("single24", "30b"), service_of("single24", "30b")
    looks = iter(range(400))
    found = search(Judge(problem, service), seed=0, spent=lambda: next(looks, 400) / 400)
    values = [each.value for each in found]
    assert values == sorted(values, reverse=True)
    refined = [each.value for each in found if each.refined]
    assert refined
    assert max(refined) >= max(each.value for each in found if not each.refined)


def test_a_seed_is_among_what_is_found() -> None:
    problem, service = problem_of("single24", "30b"), service_of("single24", "30b")
    judge = Judge(problem, service)
    seed = search(judge, seed=0, spent=lambda: 1.0)[-1].chains
    assert seed in [each.chains for each in search(judge, seeds=[seed], seed=0, spent=lambda: 1.0)]


def test_without_a_service_chains_are_judged_by_flow_and_not_moved() -> None:
    problem = problem_of("single24", "70b")
    judge = Judge(problem, None)
    found = search(judge, seed=0, spent=lambda: 0.0)
    assert found
    assert not any(each.refined for each in found)
    edges, served = judge.flow(found[0].chains)
    assert served is None
    arriving = sum(edge.tokens_per_s for edge in edges if edge.head == SINK)
    assert arriving == pytest.approx(found[0].value)
