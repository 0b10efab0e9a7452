"""Searches for chains: first by the dynamic program, then by local moves.

The dynamic program gives chains within a second at any load, so that a busy machine too has good
chains to improve; the moves use the time that is left.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from coordinator.evaluation.estimate import Estimate, added, ceiling, estimate
from coordinator.evaluation.max_flow import balanced_flow, flow_parts, solve_flow
from coordinator.problem.service import Service
from coordinator.search import local_moves
from coordinator.search.chain_dp import Chain, Chains, chains_by_dp
from coordinator.search.full_load import at_full_load
from dht.messages.types import Assignment, FlowEdge, Problem

MOVES_MAX = 2_000
"""Maximum moves of one improvement without a clock."""
STALE_MIN = 800
STALE_PER_PEER = 60
"""Moves in a row without gain that end an improvement, per peer; ``STALE_MIN`` is the minimum."""
CANDIDATES_MAX = 300
"""Maximum chains that are made without a clock."""
REFINED = 3
"""Number of the best candidates that are improved by moves."""
TIMES_MIN = 3
"""Minimum chains judged, however late it is."""
ROWS_SHARE = 0.6
"""Share of the time for the dynamic program, which usually needs a fraction of it. Where it does
not, in one of a hundred cells, it still finds more than what would come after it."""
REMEMBERED_MAX = 20_000
"""Maximum chains whose worth is cached."""
GAIN_MIN = 1.0005
"""Minimum ratio by which a move must raise the throughput."""


@dataclass(frozen=True, slots=True)
class Found:
    """Chains and their tokens/s: by the estimate, or by flow without a service."""

    value: float
    chains: Chains
    refined: bool = False
    """Whether moves improved them, by the same figure."""


class Judge:
    """Judges chains by their tokens/s: by the estimate, or by flow without a service.

    Chains share no peer, so each is judged by itself and cached: a move changes one or two.
    """

    def __init__(self, problem: Problem, service: Service | None) -> None:
        self.problem = problem
        self.service = service
        self._known: dict[Chain, _Judged] = {}
        self._ceilings: dict[tuple[str, int, bool, bool], float] = {}

    def __call__(self, chains: Chains, least: float = 0.0) -> float:
        """The chains' tokens/s; 0 once they surely serve less than ``least``."""
        known = sum(self._known[chain].value for chain in chains if chain in self._known)
        new = [chain for chain in chains if chain not in self._known]
        for chain in new:
            needed = max(0.0, least * GAIN_MIN - known) if len(new) == 1 else 0.0
            judged = self._judged(chain, needed)
            if judged is None:
                return 0.0
            known += judged.value
        return known

    def flow(self, chains: Chains) -> tuple[tuple[FlowEdge, ...], Estimate | None]:
        """The chains' flow, and with a service its estimate."""
        each = [judged for chain in chains if (judged := self._judged(chain)) is not None]
        served = [judged.served for judged in each if judged.served is not None]
        edges = tuple(edge for judged in each for edge in judged.edges)
        return edges, None if self.service is None else added(served)

    def token_s(self, made: Mapping[Chains, float]) -> float:
        """Time of a token around the ring of the best of the chains ``made``, which are given with
        their worth; 0: there are none."""
        if not made:
            return 0.0
        _, served = self.flow(max(made, key=made.__getitem__))
        return 0.0 if served is None else served.token_time_s

    def _judged(self, chain: Chain, needed: float = 0.0) -> "_Judged | None":
        """A chain's flow and worth; None where it surely serves less than what is ``needed``."""
        known = self._known.get(chain)
        if known is not None:
            return known
        problem, service = self.problem, self.service
        if service is not None and needed > 0 and self._bound(chain, service) < needed:
            return None
        if service is None:
            flow = solve_flow(problem, chain)
            judged = _Judged(flow.edges, flow.flow_tokens_per_s)
        else:
            edges = balanced_flow(problem, chain).edges
            served = estimate(problem, chain, edges, service, needed)
            if served.tokens_per_s < needed:
                return None
            judged = _Judged(edges, served.tokens_per_s, served)
        if len(self._known) >= REMEMBERED_MAX:
            self._known.clear()
        self._known[chain] = judged
        return judged

    def _bound(self, chain: Chain, service: Service) -> float:
        """A bound on a chain's tokens/s that needs no flow: what its slowest stage could serve."""
        layers = self.problem.model.layers
        sums: dict[tuple[int, int], float] = {}
        for a in chain:
            key = a.peer_id, a.end - a.start, a.start == 0, a.end == layers
            most = self._ceilings.get(key)
            if most is None:
                most = self._ceilings[key] = ceiling(a, service)
            sums[a.start, a.end] = sums.get((a.start, a.end), 0.0) + most
        return min(sums.values())


@dataclass(frozen=True, slots=True)
class _Judged:
    """A chain's flow, balanced where a service judges it, and its tokens/s."""

    edges: tuple[FlowEdge, ...]
    value: float
    served: Estimate | None = None


def search(
    judge: Judge,
    *,
    seeds: Sequence[Chains] = (),
    seed: int,
    spent: Callable[[], float] | None,
) -> list[Found]:
    """Chains for the judge's problem, best first; some of ``seeds`` may be among them.

    ``spent()`` returns the share of the time that is gone; without it, the work is a fixed amount.
    Moves only improve chains that a service judges.
    """
    problem, service = judge.problem, judge.service
    made: dict[Chains, float] = {chains: judge(chains) for chains in seeds if chains}
    rows_end = until(spent, ROWS_SHARE, CANDIDATES_MAX)
    for _ in range(2 if service else 1):  # then by how long a token takes in the best of the first
        at_load = at_full_load(problem, service, judge.token_s(made)) if service else problem
        for chains in chains_by_dp(at_load, judge=judge, go_on=rows_end):
            made[chains] = judge(chains)
    best = sorted((Found(value, chains) for chains, value in made.items()), key=lambda f: -f.value)
    if service is None or not best:
        return best
    refined = []
    began = 0.0 if spent is None else spent()
    for turn, found in enumerate(best[:REFINED], start=1):
        share = began + (1 - began) * turn / REFINED
        refined.append(improved(found.chains, judge, seed=seed, share=share, spent=spent))
    return sorted([*best, *refined], key=lambda found: -found.value)


def improved(
    chains: Chains,
    judge: Judge,
    *,
    seed: int,
    share: float,
    spent: Callable[[], float] | None,
) -> Found:
    """Chains improved by moves, until ``share`` of the time is gone or moves stop helping."""
    better, value = local_moves.improve_by_moves(
        judge.problem,
        chains,
        judge=judge,
        seed=seed,
        go_on=until(spent, share, MOVES_MAX, 0),
        stale_max=max(STALE_MIN, STALE_PER_PEER * len(judge.problem.nodes)),
    )
    return Found(value, better, refined=True)


def until(
    spent: Callable[[], float] | None, share: float, times_max: int, times_min: int = TIMES_MIN
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
