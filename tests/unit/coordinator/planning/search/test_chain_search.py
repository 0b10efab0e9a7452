"""The search over chains: what it makes with no time left, what it adds with time, and what is left
of it without OR-Tools."""

from functools import partial
from typing import Never

import pytest

from bench.planner.announced import announced_problem
from bench.planner.clusters import load
from coordinator.evaluation.estimate import chains_bound
from coordinator.evaluation.plan_check import uncovered
from coordinator.planning.search import chain_search
from coordinator.planning.search.chain_dp import Chains
from coordinator.planning.search.chain_judge import Judge
from coordinator.planning.search.chain_search import Found, Search, by_guess, search
from coordinator.planning.search.columns import Master
from coordinator.planning.search.config import SEARCH
from coordinator.planning.search.local_moves import improve_by_moves
from coordinator.planning.search.objective import Objective
from coordinator.problem.service import announced_service
from dht.messages.types import Problem
from tests.unit.coordinator.helix import problem_of, service_of
from tests.unit.coordinator.problems import ends_after


def judge_of(size: str) -> Judge:
    return Judge(problem_of("single24", size), service_of("single24", size))


def searched(judge: Judge, looks: int = 400) -> Search:
    """By the clock of a fixed number of looks."""
    return search(judge, seed=0, spent=ends_after(looks))


def check(problem: Problem, found: Search) -> None:
    """Chains cover the model, those found together share no peer, and the best is first."""
    values = [each.value for each in found.found]
    assert values == sorted(values, reverse=True)
    assert values[0] > 0
    for each in found.found:
        peers = [a.peer_id for chain in each.chains for a in chain]
        assert len(peers) == len(set(peers))
        for chain in each.chains:
            assert not uncovered(chain, problem.model.layers)


def test_no_time_left_still_gives_chains() -> None:
    judge = judge_of("70b")
    late = search(judge, seed=0, spent=lambda: 1.0)
    check(judge.problem, late)
    assert late.searched.masters == 0


def test_the_best_was_chosen_by_or_tools_of_all_that_was_judged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen, choose = [], Master.chosen
    monkeypatch.setattr(Master, "chosen", lambda self: chosen.append(choose(self)) or chosen[-1])
    judge = judge_of("30b")
    found = searched(judge, looks=3000)
    check(judge.problem, found)
    refined = [each.value for each in found.found if each.refined]
    assert max(refined) >= max(each.value for each in found.found if not each.refined)
    assert set(found.found[0].chains) == set(chosen[-1])
    assert found.found[0].value == pytest.approx(sum(judge.known[c] for c in chosen[-1]))
    done = found.searched
    assert done.columns > 20
    assert done.masters > 5
    assert done.judged > 20
    assert not done.failed
    assert (
        found.found[0].value < done.bound_tokens_per_s == chains_bound(judge.problem, judge.service)
    )


@pytest.mark.parametrize("broken", ["__init__", "prices", "chosen"])
def test_without_or_tools_the_others_search_and_it_is_said(
    broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> Never:
        raise RuntimeError("the solver is ill")

    monkeypatch.setattr(Master, broken, fails)
    judge = judge_of("30b")
    found = searched(judge)
    check(judge.problem, found)
    assert any(each.refined for each in found.found)
    assert found.searched.failed == "RuntimeError: the solver is ill"


@pytest.mark.parametrize("gains", [0, 4])
def test_the_best_gets_more_turns_as_long_as_they_help(
    gains: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = []

    def moved(chains: Chains, *_: object, seed: int, patience: float, **__: object) -> Found:
        turns.append((seed, patience))
        return Found(1e6 * min(seed, len(SEARCH.patiences) - 1 + gains), chains, refined=True)

    monkeypatch.setattr(chain_search, "improved", moved)
    spent = ends_after(400)
    found = search(judge_of("30b"), seed=0, spent=lambda: min(spent(), 0.5))
    planned = len(SEARCH.patiences)
    long = [seed for seed, patience in turns if patience == SEARCH.patiences[-1]]
    assert long.count(planned - 1) == SEARCH.refined
    assert long[SEARCH.refined :] == list(range(planned, planned + gains + SEARCH.fruitless_max))
    others = [seed for seed, patience in turns if patience != SEARCH.patiences[-1]]
    assert others.count(planned) == 1
    assert found.found[0].value >= 1e6 * (planned - 1 + gains)


def test_a_seed_is_among_what_is_found() -> None:
    judge = judge_of("30b")
    seed = search(judge, seed=0, spent=lambda: 1.0).found[-1].chains
    again = search(judge, seeds=[seed], seed=0, spent=lambda: 1.0)
    assert seed in [each.chains for each in again.found]


@pytest.mark.parametrize("lies", [False, True])
def test_moves_by_the_guess_are_kept_where_the_estimate_agrees(
    lies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They improve chains with few estimates; a guess that is wrong costs nothing but time."""
    problem = announced_problem(*load("homes-22"))
    judge = Judge(problem, announced_service(problem))
    start = search(judge, seed=0, spent=lambda: 1.0).found[0].chains
    objective, honest = Objective(judge), Objective.guess
    before, judged = objective(start), len(judge.known)
    if lies:
        monkeypatch.setattr(Objective, "guess", lambda self, chains: -honest(self, chains))
    improve = partial(improve_by_moves, judge.problem, seed=0, go_on=lambda moves: moves < 300)
    after = objective(by_guess(start, objective, improve))
    assert after == before if lies else after > 1.1 * before
    assert len(judge.known) - judged < 10
