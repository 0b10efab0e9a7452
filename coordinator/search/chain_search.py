"""Searches for chains: first by the dynamic program, then by local moves.

The dynamic program gives chains within a second at any load, so that a busy machine too has good
chains to improve; the moves use the time that is left.
"""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from coordinator.evaluation.estimate import Estimate, added, ceiling, estimate
from coordinator.evaluation.max_flow import balanced_flow, flow_parts, solve_flow, upper_bound
from coordinator.heuristics.peer_regions import regions
from coordinator.problem.service import Service
from coordinator.search import local_moves
from coordinator.search.chain_dp import FLOWS, HOLDERS, Chain, Chains, Row, chains_by_dp, orders
from coordinator.search.columns import Master
from coordinator.search.ring_rate import RingRates
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
COLUMNS = True
COLUMNS_SHARE = 0.8
THIN = 3
CHOOSE_EVERY = 4
MOVES_EACH = 400
MARGIN = 1.1
PREFILTER = True
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
        self.master = Master()
        self.ratios = []
        self.by_depth = {}
        self.margin = math.inf
        self.rates = RingRates(problem, service) if service is not None else None
        self._rate = {}
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

    def rate(self, chain):
        if not PREFILTER: return math.inf
        found = self._rate.get(chain)
        if found is None:
            found = self._rate[chain] = self.rates(chain)
        return found * self.by_depth.get(self.kind(chain), 1.0)

    @staticmethod
    def kind(chain):
        return len({a.start for a in chain})

    def known(self):
        return [(c, j.value) for c, j in self._known.items()]

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
        if service is not None and needed > 0 and (
            self._bound(chain, service) < needed or self.rate(chain) * self.margin < needed
        ):
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
        if service is not None and judged.value > 0:
            self.ratios.append(judged.value / max(1e-9, self.rate(chain)))
            k = self.kind(chain)
            mean = self.by_depth.get(k, 1.0)
            self.by_depth[k] = mean * (judged.value / max(1e-9, self._rate[chain]) / mean) ** 0.3
            if len(self.ratios) % 8 == 0:
                last = sorted(self.ratios[-64:])
                self.margin = MARGIN * last[int(0.9 * (len(last) - 1))]
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
    Column generation and moves only improve chains that a service judges.
    """
    problem, service = judge.problem, judge.service
    made: dict[Chains, float] = {chains: judge(chains) for chains in seeds if chains}
    rows_end = until(spent, ROWS_SHARE, CANDIDATES_MAX)
    at_load = at_full_load(problem, service, judge.token_s(made)) if service else problem
    for chains in chains_by_dp(at_load, judge=judge, go_on=rows_end):
        made[chains] = judge(chains)
    if service is not None and not COLUMNS:
        at_load = at_full_load(problem, service, judge.token_s(made))
        for chains in chains_by_dp(at_load, judge=judge, go_on=rows_end):
            made[chains] = judge(chains)
    if service is not None and COLUMNS:
        at_load = at_full_load(problem, service, judge.token_s(made))
        judge.stats = {}
        made |= generated(judge, at_load, seed=seed, go_on=until(spent, COLUMNS_SHARE, 40, CHOOSE_EVERY), stats=judge.stats)
    best = sorted((Found(value, chains) for chains, value in made.items()), key=lambda f: -f.value)
    if service is None or not best:
        return best
    refined = []
    began = 0.0 if spent is None else spent()
    for turn, found in enumerate(best[:REFINED], start=1):
        share = began + (1 - began) * turn / REFINED
        refined.append(improved(found.chains, judge, seed=seed, share=share, spent=spent))
    return sorted([*best, *refined], key=lambda found: -found.value)


def generated(judge, at_load, *, seed, go_on, stats):
    """Column generation."""
    master = judge.master
    rng = random.Random(seed)
    rate_of = judge.rate
    for chain, judged in judge.known():
        master.settle(chain, rate_of(chain), judged)
    region_of = regions(at_load)
    rows = [Row(at_load, order) for order in orders(at_load.nodes, region_of)]
    bound = upper_bound(replace(at_load, links=()))
    flows = [bound * step for step in FLOWS]
    ratios = [j/max(rate_of(c),1e-9) for c, j in judge.known()]
    turn = 0
    made = {}
    def cheap(chains, least=0.0):
        return sum(master.value(c, rate_of) for c in chains)
    while go_on(turn):
        row = rows[turn] if turn < len(rows) else Row(at_load, shuffled(at_load.nodes, region_of, rng))
        prices = master.prices()
        for least in (1, HOLDERS):
            for flow in flows[turn % THIN::THIN]:
                chain = row.cheapest(flow, prices, least)
                if chain is not None:
                    master.offer(chain, rate_of(chain))
        turn += 1
        if turn % CHOOSE_EVERY: continue
        for again in range(6):
            chosen = master.chosen()
            if again == 0 and MOVES_EACH:
                moved, value = local_moves.improve_by_moves(judge.problem, chosen, judge=cheap, seed=rng.randrange(1<<30), go_on=lambda n: n < MOVES_EACH and (n % 20 or go_on(turn)))
                stats["moves"] = stats.get("moves", 0) + MOVES_EACH
                for c in moved: master.offer(c, rate_of(c))
                chosen = master.chosen()
            unknown = [c for c in chosen if not master.settled(c)]
            stats["chosen"] = stats.get("chosen", 0) + 1
            if not unknown:
                break
            for c in unknown:
                worth = judge((c,))
                stats["judged"] = stats.get("judged", 0) + 1
                master.settle(c, rate_of(c), worth)
                ratios.append(worth / max(rate_of(c),1e-9))
            master.trust(sorted(ratios[-30:])[int(0.75 * (min(30,len(ratios)) - 1))])
            if not go_on(turn): break
        made[chosen] = judge(chosen)
    stats["turns"] = turn
    stats["ratio"] = master._ratio
    return made


def shuffled(nodes, region_of, rng):
    by: dict[int, list] = {}
    for n in nodes: by.setdefault(region_of[n.peer_id], []).append(n)
    keys = sorted(by); rng.shuffle(keys)
    out = []
    for k in keys:
        mine = by[k]; rng.shuffle(mine); out += mine
    return tuple(out)


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
