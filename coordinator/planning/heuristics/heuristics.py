"""Finds placements without a search: the start and the baseline of the exact search.

Each planner takes a problem, returns assignments or None, and is deterministic.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import permutations

from coordinator.evaluation.max_flow import served_by_layer
from coordinator.evaluation.plan_check import uncovered
from dht.messages.types import Assignment, PlannerNode, Problem, fits, longest_spans

PAIRS_PEERS_MAX = 6
"""Maximum peers for which :func:`chain` tries every pair of peers as its two ends."""
EVEN_OUT_MAX = 64
"""Maximum number of stages of a chain that is evened out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanLimits:
    """The most layers that one peer can hold, by their place in the model."""

    peer_id: str
    first: int
    """Maximum layers from layer 0 on, without the last one: the embedding takes room."""
    middle: int
    """Maximum layers without the first and the last one."""
    last: int
    """Maximum layers up to the last one, without the first: the LM head takes room."""
    whole: bool
    """Whether the peer can hold all layers."""


def span_limits(problem: Problem, node: PlannerNode) -> SpanLimits:
    """The most layers that ``node`` can hold at each place, whatever layers are in the middle."""
    first, middle, last, whole = _limits(spans_max(problem, node))
    return SpanLimits(peer_id=node.peer_id, first=first, middle=middle, last=last, whole=whole)


@lru_cache(maxsize=256)
def _limits(most: tuple[int, ...]) -> tuple[int, int, int, bool]:
    """The figures of :class:`SpanLimits`, from the most layers that fit from each one on."""
    layers = len(most)
    to_last = (layers - at for at in range(1, layers) if most[at] == layers - at)
    short = (most[at] for at in range(1, layers - 1) if most[at] < layers - 1 - at)
    middle = max(0, min(short, default=layers - 2))
    return min(layers - 1, most[0]), middle, max(to_last, default=0), most[0] == layers


def span_max(problem: Problem, node: PlannerNode, start: int) -> int:
    """The most layers that ``node`` can hold from ``start`` on."""
    return spans_max(problem, node)[start]


def spans_max(problem: Problem, node: PlannerNode) -> tuple[int, ...]:
    """:func:`span_max` for every start layer."""
    model = node.own_model or problem.model
    return longest_spans(model, node.memory_bytes, node.kv_tokens_min, len(node.tokens_per_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """Whether the peers can hold every layer. Exact where layers are alike; where they differ, a
    peer counts with what it can hold anywhere in the middle.

    A placement that covers all layers needs one peer at each end; all others lie between. So the
    most layers that can be held are those of the best two ends plus everybody else's in the middle.
    """

    layers: int
    """The most layers held at once, at most the model's."""
    first: str | None
    """The peer that then takes layer 0; None: nobody can."""
    last: str | None
    """The peer that then takes the last layer; None: nobody (else) can."""


def coverage(problem: Problem) -> Coverage:
    """The most layers that the peers can hold, and the peers at both ends."""
    layers = problem.model.layers
    reaches = [span_limits(problem, node) for node in problem.nodes]
    whole = next((r.peer_id for r in reaches if r.whole), None)
    if whole is not None:
        return Coverage(layers=layers, first=whole, last=whole)
    firsts = _two_best({r.peer_id: r.first - r.middle for r in reaches if r.first})
    lasts = _two_best({r.peer_id: r.last - r.middle for r in reaches if r.last})
    inner = sum(r.middle for r in reaches)
    ends = [(a, b) for a in (*firsts, None) for b in (*lasts, None) if a is None or a != b]
    first, last = max(
        ends,
        key=lambda pair: (
            sum(end is not None for end in pair),
            firsts.get(pair[0] or "", 0) + lasts.get(pair[1] or "", 0),
        ),
    )
    inner = min(inner, layers * len(reaches))
    held = inner + firsts.get(first or "", 0) + lasts.get(last or "", 0)
    reachable = layers - (first is None) - (last is None)
    return Coverage(layers=min(held, reachable), first=first, last=last)


def _two_best(gains: dict[str, int]) -> dict[str, int]:
    best = sorted(gains, key=lambda peer: (-gains[peer], peer))[:2]
    return {peer: gains[peer] for peer in best}


def chain(problem: Problem) -> tuple[Assignment, ...] | None:
    """One chain over as few peers as memory allows, evened out; None only if there is no chain."""
    covered = coverage(problem)
    if covered.layers < problem.model.layers or covered.first is None or covered.last is None:
        return None
    nodes = {node.peer_id: node for node in problem.nodes}
    if covered.first == covered.last:
        return (Assignment(peer_id=covered.first, start=0, end=problem.model.layers),)
    ends = [(covered.first, covered.last)]
    if len(nodes) <= PAIRS_PEERS_MAX:
        ends += permutations(sorted(nodes), 2)
    chains = [spans for first, last in ends if (spans := _chain_between(problem, first, last))]
    chains = [even_out(problem, spans) for spans in chains]
    return max(chains, key=lambda spans: (_rates(nodes, spans)[0], -len(spans)), default=None)


def _chain_between(problem: Problem, first: str, last: str) -> tuple[Assignment, ...] | None:
    """A chain from ``first`` to ``last``, with the peers that hold the most layers between them."""
    layers = problem.model.layers
    reaches = {node.peer_id: span_limits(problem, node) for node in problem.nodes}
    at, ahead = reaches[first].first, reaches[last].last
    if at == 0 or ahead == 0:
        return None
    spans = [Assignment(peer_id=first, start=0, end=at)]
    between = sorted(reaches.values(), key=lambda r: (-r.middle, r.peer_id))
    for r in between:
        if r.peer_id in {first, last} or r.middle == 0 or at + ahead >= layers:
            continue
        end = min(at + r.middle, layers - 1)
        spans.append(Assignment(peer_id=r.peer_id, start=at, end=end))
        at = end
    if at + ahead < layers:
        return None
    return (*spans, Assignment(peer_id=last, start=at, end=layers))


def chains(problem: Problem) -> tuple[Assignment, ...] | None:
    """Chains one after the other, each over peers that earlier ones left; the rest are spares."""
    placed: list[Assignment] = []
    left = problem
    while spans := chain(left):
        placed += spans
        taken = {a.peer_id for a in spans}
        left = replace(left, nodes=tuple(n for n in left.nodes if n.peer_id not in taken))
    return fill(problem, placed) if placed else None


def _rates(nodes: dict[str, PlannerNode], spans: Sequence[Assignment]) -> tuple[float, ...]:
    """Tokens/s of a chain's peers, the slowest first."""
    return tuple(sorted(nodes[a.peer_id].tokens_per_s[a.end - a.start - 1] for a in spans))


def even_out(problem: Problem, spans: Sequence[Assignment]) -> tuple[Assignment, ...]:
    """Move a chain's boundaries by single layers while that speeds up its slowest peers."""
    nodes = {node.peer_id: node for node in problem.nodes}
    chained = list(spans)
    improved = len(chained) <= EVEN_OUT_MAX
    while improved:
        improved = False
        for index in range(len(chained) - 1):
            for shift in (-1, 1):
                left, right = chained[index], chained[index + 1]
                cut = left.end + shift
                moved = (
                    Assignment(peer_id=left.peer_id, start=left.start, end=cut),
                    Assignment(peer_id=right.peer_id, start=cut, end=right.end),
                )
                if not all(fits(problem.model, nodes[a.peer_id], a.start, a.end) for a in moved):
                    continue
                candidate = [*chained[:index], *moved, *chained[index + 2 :]]
                if _rates(nodes, candidate) > _rates(nodes, chained):
                    chained, improved = candidate, True
    return tuple(chained)


def equal_stages(problem: Problem) -> tuple[Assignment, ...] | None:
    """SWARM's rule: equal stages; each peer in turn joins the stage with the least tokens/s.

    SWARM parallelism (Ryabinin et al., 2023). The number of stages is the one whose least served
    stage has the most tokens/s.
    """
    best: tuple[float, tuple[Assignment, ...]] | None = None
    longest = max((max(spans_max(problem, node)) for node in problem.nodes), default=0)
    layers = problem.model.layers
    fewest = max(1, layers // max(1, longest))
    for count in range(fewest, min(layers, len(problem.nodes), 2 * fewest + 2) + 1):
        cuts = [layers * index // count for index in range(count + 1)]
        served, placed = _join_stages(problem, cuts)
        if served > 0 and (best is None or served > best[0]):
            best = served, placed
    return None if best is None else fill(problem, best[1])


def _join_stages(problem: Problem, cuts: Sequence[int]) -> tuple[float, tuple[Assignment, ...]]:
    served = [0.0] * (len(cuts) - 1)
    placed: list[Assignment] = []
    # Peers with the least memory first: they fit the fewest stages.
    for node in sorted(problem.nodes, key=lambda n: (n.memory_bytes, n.peer_id)):
        able = [
            index
            for index in range(len(served))
            if fits(problem.model, node, cuts[index], cuts[index + 1])
        ]
        if not able:
            continue
        index = min(able, key=lambda index: (served[index], index))
        start, end = cuts[index], cuts[index + 1]
        served[index] += node.tokens_per_s[end - start - 1]
        placed.append(Assignment(peer_id=node.peer_id, start=start, end=end))
    return min(served), tuple(placed)


def greedy(problem: Problem) -> tuple[Assignment, ...] | None:
    """Petals' rule: each peer in turn takes the span whose layers have the least tokens/s.

    Petals (Borzunov et al., 2023), §3.3, within the memory that the model's ends leave. Layers that
    peers hold now are ignored.
    """
    nodes = tuple(replace(node, current=None) for node in problem.nodes)
    placed = fill(replace(problem, nodes=nodes), ())
    return None if uncovered(placed, problem.model.layers) else placed


def fill(problem: Problem, placed: Sequence[Assignment]) -> tuple[Assignment, ...]:
    """Give every peer that is not in ``placed`` the least served span: spare replicas.

    A peer keeps the span that it holds now where no other span is served less.
    """
    served = served_by_layer(problem, placed)
    result = list(placed)
    taken = {a.peer_id for a in placed}
    order = sorted(problem.nodes, key=lambda n: (-len(n.tokens_per_s), n.peer_id))
    for node in order:
        if node.peer_id in taken:
            continue
        added = _worst_served(problem, node, served)
        if added is None:
            continue
        rate = node.tokens_per_s[added.end - added.start - 1]
        for layer in range(added.start, added.end):
            served[layer] += rate
        result.append(added)
    return tuple(result)


def _worst_served(
    problem: Problem, node: PlannerNode, served: Sequence[float]
) -> Assignment | None:
    counts = spans_max(problem, node)
    least, end = math.inf, 0
    for at, count in enumerate(counts):
        end = max(end, at + count)
        if at < end and served[at] < least:
            least = served[at]
    if least == math.inf:
        return None
    spans, nearest = [], len(counts)  # the spans with a layer that is served least
    for at in range(len(counts) - 1, -1, -1):
        nearest = at if served[at] == least else nearest
        if nearest < at + counts[at]:
            spans.append((at, counts[at]))
    _, negative, at = min((sum(served[at : at + count]) / count, -count, at) for at, count in spans)
    now = node.current
    if (
        now is not None
        and fits(problem.model, node, now.start, now.end)
        and min(served[now.start : now.end]) <= least
    ):
        return replace(now, peer_id=node.peer_id)
    return Assignment(peer_id=node.peer_id, start=at, end=at - negative)


def replicas(problem: Problem) -> tuple[Assignment, ...] | None:
    """Whole replicas: every peer that can hold the model does; the others as in :func:`fill`."""
    layers = problem.model.layers
    whole = [
        Assignment(peer_id=node.peer_id, start=0, end=layers)
        for node in problem.nodes
        if fits(problem.model, node, 0, layers)
    ]
    return fill(problem, whole) if whole else None


def keep_layers(problem: Problem) -> tuple[Assignment, ...] | None:
    """The layers held now, with spans for peers without layers; None if layers are lost."""
    held = [
        replace(node.current, peer_id=node.peer_id)
        for node in problem.nodes
        if node.current is not None
        and fits(problem.model, node, node.current.start, node.current.end)
    ]
    placed = fill(problem, held)
    return None if uncovered(placed, problem.model.layers) else placed


def separate_pipelines(problem: Problem) -> tuple[Assignment, ...] | None:
    """Pipelines over one sort of peer each; sorts that cannot hold the model stay idle."""
    sorts: dict[tuple[float, ...], list[PlannerNode]] = {}
    for node in problem.nodes:
        sorts.setdefault(node.tokens_per_s, []).append(node)
    placed: list[Assignment] = []
    for rates in sorted(sorts, reverse=True):
        alike = replace(problem, nodes=tuple(sorts[rates]))
        placed += equal_stages(alike) or chain(alike) or ()
    return tuple(placed) if placed else None
