"""What is not estimated, as it most probably serves too little, against the estimate."""

import pytest

from bench.planner.announced import announced_problem
from bench.planner.clusters import load
from coordinator.evaluation.estimate import estimate
from coordinator.planning.search import chain_judge
from coordinator.planning.search.chain_dp import Chains
from coordinator.planning.search.chain_judge import Judge
from coordinator.planning.search.chain_search import search
from coordinator.planning.search.local_moves import improve_by_moves
from coordinator.problem.service import announced_service
from tests.unit.coordinator.problems import ends_after

MOVES = 150


def moved(judge: Judge, chains: Chains) -> list[Chains]:
    """Chains one or two moves from ``chains``, each once."""
    drawn: dict[Chains, None] = {}

    def see(found: Chains, least: float, near: Chains) -> float:
        if near:
            drawn[found] = None
        return least

    improve_by_moves(judge.problem, chains, judge=see, seed=1, go_on=lambda _: len(drawn) < MOVES)
    return list(drawn)


class Case:
    """Chains of a cluster after so many looks at the clock, and small changes of them."""

    def __init__(self, cluster: str, looks: int) -> None:
        problem = announced_problem(*load(cluster))
        self.judge = Judge(problem, announced_service(problem))
        self.chains = search(self.judge, seed=0, spent=ends_after(looks)).found[0].chains
        self.worth = self.judge(self.chains)
        self.changes = moved(self.judge, self.chains)

    def kept(self) -> list[Chains]:
        """The changes that the judge says are better."""
        return [
            chains
            for chains in self.changes
            if self.judge(chains, self.worth, self.chains) > self.worth
        ]


@pytest.mark.parametrize("cluster", ["geo24/70b", "homes-16", "homes-40"])
def test_of_small_changes_few_that_are_better_are_taken_for_worse(cluster: str) -> None:
    case = Case(cluster, looks=20)
    exact = Judge(case.judge.problem, case.judge.service)
    better = {chains for chains in case.changes if exact(chains) > 1.005 * case.worth}
    lost = better - set(case.kept())
    assert better
    assert len(lost) <= 0.1 * len(better)


@pytest.mark.parametrize("cluster", ["homes-16", "single24/30b"])
def test_of_small_changes_of_good_chains_most_are_not_estimated(
    cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(cluster, looks=300)
    estimates = []
    monkeypatch.setattr(
        chain_judge, "estimate", lambda *given: estimates.append(given) or estimate(*given)
    )
    case.kept()
    assert len(estimates) < 0.6 * len(case.changes)
