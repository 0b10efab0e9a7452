"""Finds the best placement that all planners reach in the time allowed."""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from operator import itemgetter

from coordinator.evaluation.estimate import Estimate, estimate
from coordinator.evaluation.max_flow import (
    FlowSolution,
    balanced_flow,
    mean_latency_s,
    solve_flow,
    upper_bound,
)
from coordinator.evaluation.one_answer import AnswerTimes, one_answer_s, worth
from coordinator.evaluation.plan_check import FLOW_USED_MIN, flow_wasted, uncovered
from coordinator.planning.heuristics import heuristics, peer_cells
from coordinator.planning.search.chain_dp import Chains
from coordinator.planning.search.chain_judge import Judge
from coordinator.planning.search.chain_search import (
    as_chains,
    search,
)
from coordinator.planning.search.generation import Searched
from coordinator.planning.waves import can_be_reached
from coordinator.problem.service import Service
from coordinator.simulator.judge import judge
from dht.errors import SwarmError
from dht.messages.types import (
    RECORD_BOUNDS,
    SOURCE,
    Assignment,
    FlowEdge,
    Plan,
    PlanVersion,
    Problem,
    fits,
    mean_layer_bytes,
    worth_tokens_per_s,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementConfig:
    """Which placements count as equal, and how the time for a plan is shared."""

    value_within: float = 0.98
    """Share of the best worth from which placements count as equal."""
    replicated_within: float = 0.85
    """Share of the best worth from which, in an idle swarm, a placement with two holders of every
    layer is chosen if one answer is as quick there: it has throughput to spare, and the loss of a
    layer stops it as it stops a full one. With load, this share rises to ``value_within``."""
    greedy_share: float = 0.9
    """Minimum share of the greedy placement's throughput, where the speed of one answer counts,
    too, or newcomers do; reviewers see other records, and ask 0.8."""
    latency_within: float = 1.1
    """Ratio to the fastest ring's time up to which equal placements still count as equal."""
    cells_above: int = 64
    """Number of peers above which they are planned in cells."""
    whole_peers_max: int = 400
    """Maximum peers for comparing cells with heuristics over all peers; beyond, max flow alone
    takes many seconds."""
    whole_share: float = 0.12
    """Share of the time kept for that comparison."""
    search_share: float = 0.93
    """Share of the time for the search; then spares are placed and the best plan is written."""
    kept: int = 12
    """Number of the search's best chains that are compared with the heuristics' placements; the
    best of every depth is, too."""
    spared_max: int = 6
    """Maximum placements, the best first, that are completed with spares and lose nothing by it."""
    trials_from: float = 0.6
    """Share of the time that is gone when finalists are tried, where they are."""
    tried_within: float = 0.75
    """Share of the best worth by the estimate below which no finalist is tried. Of the placements
    of 107 clusters, the one that served the most had 0.80 of the best estimate, or more."""
    trials_max: int = 16
    """Maximum finalists that are tried."""
    tried_tokens: int = 20_000
    """Decoded tokens that a trial counts, about: some 90 answers of the usual length."""


PLACEMENT = PlacementConfig()


FIRST = ("keep", "greedy")
"""Heuristics that run however late it is: peers refuse a plan that serves much less than the greedy
placement (:mod:`coordinator.plans.review`), so even a planner without time must try that one."""


class NoPlacementError(SwarmError):
    """The peers cannot hold every layer; the message says how much memory is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """An assignment of layers to peers, its scores, and the planner that found it."""

    assignments: tuple[Assignment, ...]
    flow_tokens_per_s: float
    planner: str
    edges: tuple[FlowEdge, ...] | None = None
    """The flow of each edge; None: any maximum flow."""
    estimate_tokens_per_s: float | None = None
    """Estimated throughput (:mod:`coordinator.evaluation.estimate`); None: not estimated."""
    latency_s: float = 0.0
    """Time of one token around the ring; without an estimate, only the time on links."""
    one_answer_s: float = math.inf
    """Time of a token of one answer that is alone, on the quickest ring; ``inf``: not known."""
    answer_weight: float = 0.0
    """Weight of that answer's speed in what the placement is worth."""
    moved_layers: int = 0
    """Number of layers that peers would have to fetch."""
    lone_layers: int = 0
    """Number of layers with a single holder, whose loss would stop the swarm."""
    cells: "tuple[Placement, ...]" = ()
    """The placements of cells of which this one is made."""
    searched: Searched | None = None
    """What OR-Tools did in the search that found this placement; None: there was no search."""

    @property
    def value(self) -> float:
        """Throughput in tokens/s: estimated, or the flow without an estimate."""
        return worth_tokens_per_s(self.estimate_tokens_per_s, self.flow_tokens_per_s)

    @property
    def worth(self) -> float:
        """What placements of one problem are compared by: throughput, and the speed of one
        answer by its weight."""
        return worth(self.value, self.one_answer_s, self.answer_weight)


HEURISTICS: dict[str, Callable[[Problem], tuple[Assignment, ...] | None]] = {
    "keep": heuristics.keep_layers,
    "chain": heuristics.chain,
    "chains": heuristics.chains,
    "equal-stages": heuristics.equal_stages,
    "separate": heuristics.separate_pipelines,
    "replicas": heuristics.replicas,
    "greedy": heuristics.greedy,
}


def best_placement(
    problem: Problem,
    *,
    time_limit_s: float,
    seed: int,
    spent: Callable[[], float] | None = None,
    service: Service,
    trials: bool = False,
) -> Placement:
    """The best placement of all heuristics, a dynamic program's chains and the search from there.

    Placements are judged by the estimate under ``service``. With ``trials``, the best of every
    depth are tried by short simulated runs, for ``PLACEMENT.cells_above`` peers at most.
    ``spent()`` returns the share of the time that is gone, and the work ends at 1; without it, the
    work ends after a fixed amount. The result is never worth less than the best heuristic, except
    for the 2% that a second holder or a shorter ring may cost. Peers that the flow does not need
    become spare replicas of the least served layers. The order of peers and links does not matter.
    Raises NoPlacementError when the layers cannot be covered.
    """
    shortage = why_uncoverable(problem)
    if shortage is not None:
        raise NoPlacementError(shortage)
    in_order = replace(
        problem,
        nodes=tuple(sorted(problem.nodes, key=lambda node: node.peer_id)),
        links=tuple(sorted(problem.links, key=lambda k: (k.source, k.target, k.measured_unix_s))),
    )
    return _best(in_order, time_limit_s, seed, spent, service, trials=trials)


def _best(
    problem: Problem,
    time_limit_s: float,
    seed: int,
    spent: Callable[[], float] | None,
    service: Service,
    *,
    trials: bool = False,
) -> Placement:
    """:func:`best_placement` for a problem that can be covered, with its peers in order."""
    parts = peer_cells.cells(problem) if len(problem.nodes) > PLACEMENT.cells_above else ()
    if len(parts) > 1:
        alone = len(problem.nodes) > PLACEMENT.whole_peers_max
        clock = peer_cells.ends_at(spent, 1.0 if alone else 1 - PLACEMENT.whole_share)
        cells = _by_cells(problem, parts, time_limit_s, seed, clock, service)
        if alone or (spent is not None and spent() >= PLACEMENT.search_share):
            return cells
        whole = _heuristics(problem, service, peer_cells.ends_at(spent, PLACEMENT.search_share))
        better = [p for p in whole if p.worth > cells.worth]
        return _best_with_spares(problem, better, service) if better else cells
    clock = peer_cells.ends_at(spent, PLACEMENT.trials_from if trials else PLACEMENT.search_share)
    found = _heuristics(problem, service, clock)
    found += _unless_it_fails(lambda: _searched(problem, service, found, seed, clock))
    found = adoptable(problem, found) or found
    if trials:
        found = _unless_it_fails(lambda: [tried_best(problem, service, found, spent)]) or found
    searched = next((placement.searched for placement in found if placement.searched), None)
    return replace(_best_with_spares(problem, found, service), searched=searched)


def adoptable(problem: Problem, found: Sequence[Placement]) -> list[Placement]:
    """The placements that peers would accept and to which they can move.

    Reviewers accept none that serves much less than the greedy one by the estimate. A quicker
    answer may cost a tenth of that, nothing else may.
    """
    least = max((p.value for p in found if p.planner == "greedy"), default=0.0)
    least *= PLACEMENT.greedy_share if any(p.answer_weight for p in found) else 1.0
    serving = [node.current for node in problem.nodes if node.current is not None]
    return [
        placement
        for placement in found
        if placement.value >= least
        and (
            not serving or can_be_reached(serving, heuristics.fill(problem, placement.assignments))
        )
    ]


def _unless_it_fails(planner: Callable[[], list[Placement]]) -> list[Placement]:
    """The placements of ``planner``; none if it raises: what strangers announce may break one
    planner, and the others' placements must count then."""
    try:
        return planner()
    except Exception:  # whatever a solver raises on figures that nobody foresaw
        logger.exception("a planner failed; the others go on")
        return []


def _heuristics(
    problem: Problem, service: Service, spent: Callable[[], float] | None
) -> list[Placement]:
    """The placements of all heuristics, or only of those in ``FIRST`` where the time is over."""
    found: list[Placement] = []
    scored: dict[tuple[Assignment, ...], Placement] = {}  # some often find the same
    for name in sorted(HEURISTICS, key=lambda name: name not in FIRST):
        if found and name not in FIRST and spent is not None and spent() >= 1:
            break
        if name == "keep" and not any(node.current for node in problem.nodes):
            continue  # there is nothing to keep
        assignments = HEURISTICS[name](problem)
        if assignments is None or uncovered(assignments, problem.model.layers):
            continue
        if assignments not in scored:
            scored[assignments] = score(problem, assignments, name, service=service)
        found.append(replace(scored[assignments], planner=name))
        if name == "greedy":  # also with the flow that reviewers assume
            edges = solve_flow(problem, assignments).edges
            found.append(score(problem, assignments, name, service=service, edges=edges))
    return found


def _best_with_spares(problem: Problem, found: Sequence[Placement], service: Service) -> Placement:
    """The best of the placements once spares are placed, which serve more in one than in another.

    Those that may still be the best are completed, up to ``PLACEMENT.spared_max`` whose spares cost
    them nothing.
    """
    left, spared = list(found), list[Placement]()
    least, sound = 0.0, 0
    while left and sound < PLACEMENT.spared_max:
        best = choose(left)
        if best.worth < PLACEMENT.value_within * least:
            break
        spared.append(with_spares(problem, best, service))
        least = max(least, spared[-1].worth)
        sound += spared[-1].worth >= PLACEMENT.value_within * best.worth
        left = [p for p in left if set(p.assignments) != set(best.assignments)]
    return choose(spared)


def _by_cells(
    problem: Problem,
    parts: Sequence[Problem],
    time_limit_s: float,
    seed: int,
    spent: Callable[[], float] | None,
    service: Service,
) -> Placement:
    """The placement of cells planned one after the other."""
    found = [
        _best(
            part,
            time_limit_s / len(parts),
            seed,
            peer_cells.share_of_time(spent, len(parts) - index),
            service,
        )
        for index, part in enumerate(parts)
    ]
    return together(found, service)


def together(found: Sequence[Placement], service: Service) -> Placement:
    """Placements that share no peer, as one; flow stays inside each."""
    value = sum(placement.value for placement in found)
    return Placement(
        assignments=tuple(a for placement in found for a in placement.assignments),
        flow_tokens_per_s=sum(placement.flow_tokens_per_s for placement in found),
        planner=f"{len(found)} cells",
        edges=tuple(edge for placement in found for edge in placement.edges or ()),
        estimate_tokens_per_s=sum(p.estimate_tokens_per_s or 0.0 for p in found),
        latency_s=sum(p.value * p.latency_s for p in found) / max(value, 1e-9),
        moved_layers=sum(placement.moved_layers for placement in found),
        one_answer_s=min(placement.one_answer_s for placement in found),
        answer_weight=service.workload.answer_weight,
        lone_layers=0 if len(found) > 1 else found[0].lone_layers,
        searched=sum((p.searched for p in found if p.searched is not None), Searched()),
        cells=tuple(cell for placement in found for cell in placement.cells or (placement,)),
    )


def with_spares(problem: Problem, placement: Placement, service: Service) -> Placement:
    """The placement with spare replicas on all other peers that can hold a layer.

    Spares carry flow where that serves more, or where the flow would otherwise use less than
    ``FLOW_USED_MIN`` of the placement's maximum, which the checker refuses; else they stand by.
    Where there are cells, spares join the nearest; of more than ``PLACEMENT.whole_peers_max``
    peers, they carry no flow between cells unless the checker asks for it.
    """
    if len(placement.cells) > 1:
        idle = _with_spares_in_cells(problem, placement, service)
    else:
        filled = heuristics.fill(problem, placement.assignments)
        idle = counted(problem, replace(placement, assignments=filled))
    planner, filled = placement.planner, idle.assignments
    if placement.edges is None:
        return score(problem, filled, planner, service=service)
    if len(problem.nodes) > PLACEMENT.whole_peers_max and not flow_wasted(
        problem, filled, idle.flow_tokens_per_s
    ):
        return idle
    flow = balanced_flow(problem, filled)
    wasted = idle.flow_tokens_per_s < FLOW_USED_MIN * flow.flow_tokens_per_s
    # A flow between cells takes long links, and leaves no cells to keep after the next change.
    least = (
        0.0
        if wasted
        else idle.value / (PLACEMENT.value_within if len(placement.cells) > 1 else 1.0)
    )
    served = estimate(problem, filled, flow.edges, service, least)
    if served.tokens_per_s < least:
        return idle
    carrying = score(problem, filled, planner, service=service, edges=flow.edges, served=served)
    return carrying if wasted or carrying.worth >= idle.worth else idle


def _with_spares_in_cells(problem: Problem, placement: Placement, service: Service) -> Placement:
    """The placement of cells, with each peer that is in none as a spare in the nearest."""
    members = [{a.peer_id for a in cell.assignments} for cell in placement.cells]
    joined = peer_cells.with_nearest(problem, members)
    found = []
    for part, own, cell in zip(
        peer_cells.parts(problem, joined), members, placement.cells, strict=True
    ):
        beside = {node.peer_id for node in part.nodes} - own
        held = [a for a in placement.assignments if a.peer_id in beside] if beside else ()
        more = replace(cell, assignments=(*cell.assignments, *held))
        found.append(with_spares(part, more, service) if beside else cell)
    return counted(problem, replace(together(found, service), planner=placement.planner))


def _searched(
    problem: Problem,
    service: Service,
    heuristics_: Sequence[Placement],
    seed: int,
    spent: Callable[[], float] | None,
) -> list[Placement]:
    """The best chains that the search finds, some of a heuristic among them, perhaps moved."""
    layers = problem.model.layers
    seeds = [as_chains(p.assignments, p.edges or (), layers) for p in heuristics_]
    judge = Judge(problem, service)
    made = search(judge, seeds=seeds, seed=seed, spent=spent)
    depths: set[int] = set()
    kept = []
    for number, found in enumerate(made.found):
        depth = _depth([a for chain in found.chains for a in chain])
        if number < PLACEMENT.kept or depth not in depths:
            kept.append(found)
        depths.add(depth)
    names = [f"{found.planner}, moved" if found.refined else found.planner for found in kept]
    return [
        replace(of_chains(judge, found.chains, name), searched=made.searched)
        for found, name in zip(kept, names, strict=True)
    ]


def of_chains(judge: Judge, chains: Chains, planner: str) -> Placement:
    """The placement of chains, with the flow and worth that the judge knows."""
    edges, served = judge.flow(chains)
    spans = [a for chain in chains for a in chain]
    return score(judge.problem, spans, planner, service=judge.service, edges=edges, served=served)


def _depth(assignments: Sequence[Assignment]) -> int:
    """Number of different spans: that of stages, where the placement is one chain."""
    return len({(a.start, a.end) for a in assignments})


def finalists(found: Sequence[Placement]) -> list[Placement]:
    """The best placement of every depth and planner by the estimate: one that was searched and one
    that was not by turns, each best first.

    The estimate errs most between depths, and for what was searched by the estimate itself. What by
    the estimate is worth far less than the best is left out. Of placements that it does not tell
    apart, such as those that differ by peers of the same sort, the one that moves the fewest layers
    is kept.
    """
    kept: dict[tuple[str, int], Placement] = {}
    same: set[tuple[int, str, str]] = set()
    least = PLACEMENT.tried_within * max(placement.worth for placement in found)
    near = [placement for placement in found if placement.worth >= least]
    for placement in sorted(near, key=lambda p: (-float(f"{p.worth:.9g}"), p.moved_layers)):
        depth = _depth(placement.assignments)
        key = placement.planner, depth
        looks = depth, f"{placement.value:.9g}", f"{placement.latency_s:.9g}"
        if key not in kept and looks not in same:
            kept[key] = placement
            same.add(looks)
    simple = [p for p in kept.values() if p.planner in HEURISTICS]
    searched = [p for p in kept.values() if p.planner not in HEURISTICS]
    pairs = zip_longest(searched, simple)
    return [placement for pair in pairs for placement in pair if placement is not None]


def tried_best(
    problem: Problem,
    service: Service,
    found: Sequence[Placement],
    spent: Callable[[], float] | None,
) -> Placement:
    """The finalist of the most worth by what it serves in a short simulated run, or one near it
    with two holders of every layer; as many are tried as there is time for, the first always."""
    tried: list[tuple[float, Placement]] = []
    before = 0.0
    for placement in finalists(found)[: PLACEMENT.trials_max]:
        now = spent() if spent is not None else 0.0
        if tried and now + (now - before) >= 1:  # the next takes as long as the last
            break
        before = now
        served = judge(
            problem, service, placement.assignments, placement.edges, tokens=PLACEMENT.tried_tokens
        )
        shown = worth(served, placement.one_answer_s, placement.answer_weight)
        tried.append((shown, placement))
    return max(_replicated(tried), key=itemgetter(0))[1]


def _replicated(found: Sequence[tuple[float, Placement]]) -> Sequence[tuple[float, Placement]]:
    """Those of the placements, with what they are worth, that have two holders of every layer and
    are as quick for one answer as the best, if one of them is near the best; else all."""
    most, best = max(found, key=itemgetter(0))
    idle = best.answer_weight / RECORD_BOUNDS.answer_weight_max
    least = (
        PLACEMENT.value_within - idle * (PLACEMENT.value_within - PLACEMENT.replicated_within)
    ) * most
    near = [
        (value, placement)
        for value, placement in found
        if value >= least
        and not placement.lone_layers
        and (not idle or placement.one_answer_s <= best.one_answer_s)
    ]
    return near or found


def score(
    problem: Problem,
    assignments: Sequence[Assignment],
    planner: str,
    *,
    service: Service | None = None,
    edges: Sequence[FlowEdge] | None = None,
    served: Estimate | None = None,
) -> Placement:
    """A placement with its scores. Without ``edges``, its flow is a maximum flow; ``served`` is its
    estimate, where that is known."""
    if edges is None:
        solution = (balanced_flow if service else solve_flow)(problem, assignments)
    else:
        entering = sum(edge.tokens_per_s for edge in edges if edge.tail == SOURCE)
        solution = FlowSolution(flow_tokens_per_s=entering, edges=tuple(edges))
    if service and served is None:
        served = estimate(problem, assignments, solution.edges, service)
    return counted(
        problem,
        Placement(
            assignments=tuple(assignments),
            flow_tokens_per_s=solution.flow_tokens_per_s,
            planner=planner,
            edges=solution.edges,
            estimate_tokens_per_s=served.tokens_per_s if served else None,
            latency_s=served.token_time_s if served else mean_latency_s(problem, solution),
            one_answer_s=(
                one_answer_s(AnswerTimes(problem, service), assignments, solution.edges)
                if service
                else math.inf
            ),
            answer_weight=service.workload.answer_weight if service else 0.0,
        ),
    )


def counted(problem: Problem, placement: Placement) -> Placement:
    """The placement with the numbers of layers that are fetched, and that have one holder."""
    held = {node.peer_id: node.current for node in problem.nodes}
    holders = [0] * problem.model.layers
    for a in placement.assignments:
        for layer in range(a.start, a.end):
            holders[layer] += 1
    return replace(
        placement,
        moved_layers=sum(
            _fetched(held.get(a.peer_id), a.start, a.end) for a in placement.assignments
        ),
        lone_layers=holders.count(1),
    )


def _fetched(held: Assignment | None, start: int, end: int) -> int:
    """The number of layers of ``[start, end)`` that the peer does not hold yet."""
    if held is None:
        return end - start
    return end - start - max(0, min(end, held.end) - max(start, held.start))


def choose(found: Sequence[Placement]) -> Placement:
    """The best placement by these objectives, in this order.

    Two holders of every layer, since volunteers leave and the loss of a layer stops the swarm, if
    that costs 2% of the worth at most, or up to 15% in a swarm with little to do; the most worth;
    within 2% of it, the fewest layers with a single holder; then the shortest ring; within 10% of
    that, the fewest layers to fetch.
    """
    kept = [p for _, p in _replicated([(p.worth, p) for p in found])]
    most = max(placement.worth for placement in kept)
    near = [p for p in kept if p.worth >= PLACEMENT.value_within * most]
    fewest = min(placement.lone_layers for placement in near)
    near = [p for p in near if p.lone_layers == fewest]
    fastest_s = min(placement.latency_s for placement in near)
    near = [p for p in near if p.latency_s <= PLACEMENT.latency_within * fastest_s]
    return min(near, key=lambda p: (p.moved_layers, p.latency_s, -p.worth))


def why_uncoverable(problem: Problem) -> str | None:
    """The reason why no placement can cover all layers; None: one can. Exact and quick."""
    model = problem.model
    covered = heuristics.coverage(problem)
    if covered.layers >= model.layers:
        return None
    kv_tokens = max((node.kv_tokens_min for node in problem.nodes), default=0)
    each = mean_layer_bytes(model) + kv_tokens * model.kv_bytes_per_token_layer
    more = (model.layers - covered.layers) * each
    more += model.embed_bytes if covered.first is None else 0
    more += model.head_bytes if covered.last is None else 0
    count = len(problem.nodes)
    peers = "one peer" if count == 1 else f"{count} peers"
    return (
        f"the {peers} here can hold at most {covered.layers} of {model.layers} layers beside"
        f" embedding and head; about {more / 2**30:.3g} GiB more are needed"
    )


def make_plan(
    problem: Problem,
    placement: Placement,
    *,
    version: PlanVersion,
    coordinator: str,
    solve_s: float,
    now_unix_s: float,
) -> Plan:
    """The plan of a placement; without edges it gets a maximum flow.

    Raises ValueError for a span that does not fit its peer.
    """
    nodes = {node.peer_id: node for node in problem.nodes}
    for a in placement.assignments:
        if not fits(problem.model, nodes[a.peer_id], a.start, a.end):
            raise ValueError(f"[{a.start}, {a.end}) does not fit {a.peer_id}")
    if placement.edges is None:
        placement = score(problem, placement.assignments, placement.planner)
    estimated = placement.estimate_tokens_per_s
    return Plan(
        version=version,
        coordinator=coordinator,
        model=problem.model,
        assignments=placement.assignments,
        edges=placement.edges or (),
        flow_tokens_per_s=placement.flow_tokens_per_s,
        bound_tokens_per_s=upper_bound(problem),
        planner=placement.planner,
        estimate_tokens_per_s=None if estimated is None else min(estimated, RECORD_BOUNDS.rate_max),
        solve_s=solve_s,
        created_unix_s=now_unix_s,
        answer_weight=placement.answer_weight,
    )
