"""Searches for chains: by the dynamic program, by column generation, then by local moves.

The dynamic program gives chains within a second at any load. Column generation finds which chains
live together best, moves improve each chain, and the last choice among all that were judged is
again OR-Tools'.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, islice, pairwise

from coordinator.evaluation.max_flow import flow_parts
from coordinator.planning.search import local_moves
from coordinator.planning.search.chain_dp import Chain, Chains, chains_by_dp
from coordinator.planning.search.chain_judge import Judge
from coordinator.planning.search.config import SEARCH
from coordinator.planning.search.full_load import at_full_load
from coordinator.planning.search.generation import Generation, GenerationConfig, Searched
from coordinator.planning.search.objective import Objective
from coordinator.planning.search.short_rings import short_rings
from dht.messages.types import Assignment, FlowEdge

HELD_SHARES = (1.0, 0.75)
"""Shares of the most layers that their peers can hold: with all, little KV room is left."""
BY_DP, BY_COLUMNS = "chains by dp", "chains by OR-Tools"
"""Who found chains, as plans say it."""


@dataclass(frozen=True, slots=True)
class Found:
    """Chains and their worth (:class:`coordinator.planning.search.objective.Objective`)."""

    value: float
    chains: Chains
    planner: str = BY_DP
    refined: bool = False
    """Whether moves improved them, by the same figure."""


@dataclass(frozen=True, slots=True)
class Search:
    """What a search found, best first, and what OR-Tools did in it."""

    found: tuple[Found, ...]
    searched: Searched


def search(
    judge: Judge,
    *,
    seeds: Sequence[Chains] = (),
    seed: int,
    spent: Callable[[], float] | None,
) -> Search:
    """Chains for the judge's problem; some of ``seeds`` may be among them.

    ``spent()`` returns the share of the time that is gone; without it, the work is a fixed amount.
    Where OR-Tools fails, only its steps find nothing.
    """
    objective = Objective(judge)
    made: dict[Chains, float] = {chains: judge(chains) for chains in seeds if chains}
    at_load = at_full_load(judge.problem, judge.service, judge.token_s(made))
    rows_end = until(spent, SEARCH.sets_share, SEARCH.candidates_max)
    for chains in chains_by_dp(at_load, judge=judge, go_on=rows_end):
        made[chains] = judge(chains)
    best = [Found(objective(chains), chains) for chains in made]
    generation = Generation(judge, seed=seed)
    at_load = at_full_load(judge.problem, judge.service, judge.token_s(made))
    turns_end = until(spent, SEARCH.columns_share, GenerationConfig().turns_max, 0)
    generated = generation.generated(at_load, turns_end, _rings(objective))
    best += [Found(objective(chains), chains, BY_COLUMNS) for chains in generated if chains]
    best.sort(key=lambda found: -found.value)
    refined = _refined(_distinct(best), judge, objective, seed=seed, spent=spent)
    if chosen := generation.chosen():
        refined.insert(0, Found(objective(chosen), chosen, BY_COLUMNS, refined=True))
    ordered = sorted([*refined, *best], key=lambda found: -found.value)
    return Search(tuple(ordered), generation.searched)


def _rings(objective: Objective) -> list[Chain]:
    """The quickest rings, where the speed of one answer counts."""
    shares = HELD_SHARES if objective.weight else ()
    each = (short_rings(objective.times, SEARCH.rings, share) for share in shares)
    return list(dict.fromkeys(ring for found in each for _, ring in found))


def _distinct(found: Sequence[Found]) -> list[Found]:
    """The first of those with the same chains, in any order."""
    first: dict[frozenset[Chain], Found] = {}
    for each in found:
        first.setdefault(frozenset(each.chains), each)
    return list(first.values())


def _refined(
    candidates: Sequence[Found],
    judge: Judge,
    objective: Objective,
    *,
    seed: int,
    spent: Callable[[], float] | None,
) -> list[Found]:
    """The best candidates, improved by moves in turns, best first.

    While there is time after that, one more candidate gets a turn, and the best so far another with
    other draws, until ``SEARCH.fruitless_max`` such turns in a row brought nothing.
    """

    def moved(found: Found, turn: int, patience: float) -> Found:
        better = improved(
            found.chains, judge, objective, seed=seed + turn, patience=patience, spent=spent
        )
        return replace(better, planner=found.planner)

    def in_order(found: Iterable[Found]) -> list[Found]:
        return sorted(found, key=lambda each: -each.value)

    refined = list(candidates[: SEARCH.refined])
    for turn, patience in enumerate(SEARCH.patiences):
        refined = in_order([moved(found, turn, patience) for found in refined])
    later = iter(candidates[SEARCH.refined :])
    fruitless = 0
    for turn in count(len(SEARCH.patiences)):
        if not refined or spent is None or spent() >= 1 or fruitless == SEARCH.fruitless_max:
            return refined
        most = refined[0].value
        others = [moved(found, turn, SEARCH.patiences[0]) for found in islice(later, 1)]
        best, *rest = in_order([*refined, *others])
        refined = in_order([moved(best, turn, SEARCH.patiences[-1]), *rest])
        fruitless = 0 if refined[0].value > most else fruitless + 1
    return refined


def improved(
    chains: Chains,
    judge: Judge,
    objective: Objective,
    *,
    seed: int,
    spent: Callable[[], float] | None,
    patience: float = 1.0,
) -> Found:
    """Chains improved by moves, until the time is gone or moves stop helping: no gain in as many in
    a row as ``patience``, a share of the most, allows."""
    most = max(SEARCH.stale_least, SEARCH.stale_per_peer * len(judge.problem.nodes))
    move = partial(
        local_moves.improve_by_moves,
        judge.problem,
        seed=seed,
        go_on=until(spent, 1.0, SEARCH.moves_max, 0),
        stale_max=round(patience * most),
    )
    better, value = move(by_guess(chains, objective, move), judge=objective)
    return Found(value, better, refined=True)


def by_guess(
    chains: Chains, objective: Objective, move: Callable[..., tuple[Chains, float]]
) -> Chains:
    """Chains improved by moves that the guess judges, as far as the estimate agrees with where they
    lead: it takes many times as long."""
    while True:
        moved, _ = move(chains, judge=lambda chains, *_: objective.guess(chains))
        value = objective(chains)
        if moved == chains or objective(moved, value, chains) <= value:
            return chains
        chains = moved


def until(
    spent: Callable[[], float] | None,
    share: float,
    times_max: int,
    times_min: int = SEARCH.judged_least,
) -> Callable[[int], bool]:
    """A function that says whether to go on after a number of tries.

    By the clock, at least ``times_min`` tries; without a clock, ``times_max`` tries.
    """
    if spent is None:
        return lambda times: times < times_max
    return lambda times: times < times_min or spent() < share


def as_chains(assignments: Sequence[Assignment], edges: Sequence[FlowEdge], layers: int) -> Chains:
    """The chains of a placement, without peers that have no flow.

    Empty where the spans of a part of the flow do not follow each other.
    """
    flowing = {edge.head for edge in edges}
    used = [a for a in assignments if a.peer_id in flowing]
    chains = tuple(tuple(a for a in used if a.peer_id in part) for part in flow_parts(edges))
    return chains if all(_is_chain(chain, layers) for chain in chains) else ()


def _is_chain(spans: Sequence[Assignment], layers: int) -> bool:
    ranges = sorted({(a.start, a.end) for a in spans})
    joints = pairwise(ranges)
    return (
        bool(ranges)
        and ranges[0][0] == 0
        and ranges[-1][1] == layers
        and all(a[1] == b[0] for a, b in joints)
    )
