"""What a placement waits for, which losses hurt it most, and what one more peer brings. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from coordinator.evaluation.explain.graph import CutEdge, PlacementGraph, graph_of
from dht.messages.types import Assignment, PlannerNode, Problem, fits, layer_ranges


@dataclass(frozen=True, slots=True, kw_only=True)
class WeakPointsConfig:
    """How many weak points are tried and named, and from which share of the flow on."""

    equal: float = 1e-6
    """Relative difference below which two flows are the same: capacities are whole units."""
    losses_max: int = 3
    """Maximum losses that are named."""
    tried_max: int = 12
    """Maximum losses that are tried, those that may cost the most first: each is a maximum flow."""
    loss_min: float = 0.05
    """Minimum share of the flow that a named loss costs."""
    kinds_max: int = 6
    """Maximum kinds of peers of which one more is tried."""
    gain_min: float = 0.01
    """Minimum gain, as a share of the flow, that is named."""


WEAK_POINTS = WeakPointsConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """What the loss of one peer costs."""

    peer_id: str
    share: float
    """Share of the flow that is lost with it; 1: no answers are left."""
    layers: tuple[tuple[int, int], ...] = ()
    """Ranges of layers that nobody else holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """What one more peer at the narrowest layers brings."""

    like: str
    """The peer that it is a copy of."""
    share: float
    """By what share the flow grows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeakPoints:
    """The answers of a placement's graph."""

    layers: int
    """Layers of the model."""
    missing: tuple[tuple[int, int], ...] = ()
    """Ranges of layers without a holder; all else is empty then."""
    tokens_per_s: float = 0.0
    """The most that the placement carries."""
    narrowest: tuple[tuple[int, int], ...] = ()
    """Ranges of layers whose holders together carry no more than that."""
    holders: tuple[str, ...] = ()
    """The holders of the narrowest layers, where that is one range with the same ones."""
    slowed: tuple[str, ...] = ()
    """Those of them whose own connection carries less than their processors."""
    links: tuple[CutEdge, ...] = ()
    """The minimum cut where no layers are as narrow: links between peers."""
    gain: Gain | None = None
    """The best gain of one more peer."""
    losses: tuple[Loss, ...] = ()
    """The losses that cost the most, the worst first."""
    needed: int = 0
    """Number of peers that every route passes."""
    fewest: tuple[str, ...] = ()
    """The fewest peers without which there is no route."""


def weak_points(problem: Problem, assignments: Sequence[Assignment]) -> WeakPoints:
    """Ask the graph of a placement; bounded in time for thousands of peers."""
    asked = graph_of(problem, assignments)
    missing = layer_ranges(at for at, each in enumerate(asked.holders) if not each)
    if missing:
        return WeakPoints(layers=problem.model.layers, missing=missing)
    flow = asked.tokens_per_s()
    sums = [sum(asked.carries[peer] for peer in each) for each in asked.holders]
    narrow = layer_ranges(
        at for at, rate in enumerate(sums) if rate <= flow * (1 + WEAK_POINTS.equal)
    )
    sets = {asked.holders[at] for start, end in narrow for at in range(start, end)}
    holders = sets.pop() if len(sets) == len(narrow) == 1 else ()
    return WeakPoints(
        layers=problem.model.layers,
        tokens_per_s=flow,
        narrowest=narrow,
        holders=holders,
        slowed=tuple(peer for peer in holders if peer in asked.slowed),
        links=() if narrow else asked.cut(),
        gain=_best_gain(asked, narrow[0], flow) if len(narrow) == 1 else None,
        losses=_worst(asked, flow),
        needed=len(asked.on_all_routes()),
        fewest=asked.fewest(),
    )


def _worst(asked: PlacementGraph, flow: float) -> tuple[Loss, ...]:
    """The losses that cost the most. No loss costs more than what flows through the peer, so those
    that cannot be among the worst are not tried."""
    found: list[Loss] = []
    needed = asked.on_all_routes()
    for peer in sorted(needed)[: WEAK_POINTS.losses_max]:
        alone = layer_ranges(at for at, each in enumerate(asked.holders) if each == (peer,))
        found.append(Loss(peer_id=peer, share=1.0, layers=alone))
    bounds = {peer: most for peer, most in asked.through().items() if peer not in needed}
    order = sorted(bounds, key=lambda peer: (-bounds[peer], peer))
    for peer in order[: WEAK_POINTS.tried_max]:
        worst = _worst_of(found)
        if flow <= 0 or (
            len(worst) == WEAK_POINTS.losses_max and worst[-1].share >= bounds[peer] / flow
        ):
            break
        share = max(0.0, 1 - asked.without(peer).tokens_per_s() / flow)
        if share >= WEAK_POINTS.loss_min:
            found.append(Loss(peer_id=peer, share=share))
    return tuple(_worst_of(found))


def _worst_of(found: Sequence[Loss]) -> list[Loss]:
    return sorted(found, key=lambda loss: -loss.share)[: WEAK_POINTS.losses_max]


def _best_gain(asked: PlacementGraph, at: tuple[int, int], flow: float) -> Gain | None:
    """The gain of a copy of the peer that brings the most at these layers; None: none can."""
    start, end = at
    problem, found = asked.problem, []
    kinds: dict[tuple[float, ...], PlannerNode] = {}
    for node in sorted(problem.nodes, key=lambda n: n.peer_id):
        if fits(problem.model, node, start, end):
            kinds.setdefault(node.tokens_per_s, node)
    rate = end - start - 1
    for node in sorted(kinds.values(), key=lambda n: (-n.tokens_per_s[rate], n.peer_id))[
        : WEAK_POINTS.kinds_max
    ]:
        larger, name = with_twin(problem, node)
        twin = Assignment(peer_id=name, start=start, end=end)
        more = graph_of(larger, (*asked.assignments, twin)).tokens_per_s()
        share = more / flow - 1 if flow > 0 else math.inf
        found.append(Gain(like=node.peer_id, share=share))
    found.reverse()  # of those that bring as much, the slowest
    best = max(found, key=lambda gain: round(gain.share, 6), default=None)
    return best if best is not None and WEAK_POINTS.gain_min <= best.share < math.inf else None


def with_twin(problem: Problem, node: PlannerNode) -> tuple[Problem, str]:
    """The problem with one more peer, a copy of ``node`` with the same links, and its name."""
    name = f"{node.peer_id[:58]}+1"
    links = [replace(k, source=name) for k in problem.links if k.source == node.peer_id]
    links += [replace(k, target=name) for k in problem.links if k.target == node.peer_id]
    between = [k for k in problem.links if k.source == node.peer_id]
    if between:
        nearest = min(between, key=lambda k: k.rtt_s)
        links += [
            replace(nearest, source=node.peer_id, target=name),
            replace(nearest, source=name, target=node.peer_id),
        ]
    nodes = (*problem.nodes, replace(node, peer_id=name, current=None, uplink=""))
    return replace(problem, nodes=nodes, links=(*problem.links, *links)), name
