"""Reviews a published plan against the records that this peer sees. Pure.

:func:`coordinator.evaluation.plan_check.check_shape` checks a plan by itself. This module compares
it with the swarm: the peers that exist, the memory and speed that they announced, and a cheap
baseline, Petals' greedy placement. Plan and baseline are compared by what they would serve, as
coordinators compare placements. Records differ between peers and moments, hence the slack. A plan
is advice: refusing one costs efficiency at most.

No author may leave peers out as it likes, and no peer may make an honest author's plans look bad.
So a plan uses a peer, or is as good as the greedy placement with it, or says that the peer does not
answer the author. A peer of which a plan says so counts in nobody's comparison but its own. If it
hides from the author alone, the comparison ignores it; if it is falsely said to hide, it knows that
and refuses the plan (:mod:`coordinator.plans.reviewer`). Nor is held against a plan what a peer has
only just begun to say of itself.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from coordinator.evaluation.estimate import estimate
from coordinator.evaluation.max_flow import solve_flow
from coordinator.evaluation.plan_check import FLOW_USED_MIN, uncovered
from coordinator.planning.heuristics.heuristics import greedy
from coordinator.plans.transition import usable_nodes
from coordinator.problem.from_records import problem_of
from coordinator.problem.service import announced_service
from dht.messages.types import (
    SINK,
    SOURCE,
    Assignment,
    FlowEdge,
    LinksRecord,
    NodeRecord,
    NodeState,
    Plan,
    Problem,
    fits,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReviewConfig:
    """How far a plan may be from what its reviewer sees itself."""

    rate_slack: float = 1.1
    """Maximum flow through a peer, as a multiple of the speed that it announced."""
    link_slack: float = 4.0
    """Maximum flow over a link, as a multiple of its measured bandwidth, which changes often."""
    greedy_share_min: float = 0.8
    """Minimum that a plan must serve, as a share of the greedy placement. Coordinators find at
    least the greedy one, but move nobody for a gain below 10%, and saw other records."""
    running_share_min: float = 0.5
    """The same minimum for the running plan: peers that just moved stay for a while."""
    known_for_s: float = 30.0
    """Time since its offer was first seen after which a plan must count a peer, and must fit it
    where it offered something else before."""


REVIEW = ReviewConfig()


class Opinion(StrEnum):
    """What a peer thinks of a plan."""

    FINE = "fine"
    UNSURE = "unsure"
    """The plan counts on peers that are not known here, or not yet."""
    IMPOSSIBLE = "impossible"
    WORSE = "worse"
    """The plan serves too little beside the greedy placement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """An opinion with its reason."""

    opinion: Opinion
    reason: str = ""
    blames: bool = True
    """Whether a refusal is held against the author."""


FINE = Verdict(opinion=Opinion.FINE)


def review(
    plan: Plan,
    nodes: Mapping[str, NodeRecord],
    links: Mapping[str, LinksRecord],
    *,
    running: Plan | None,
    gone: frozenset[str],
    changed: frozenset[str] = frozenset(),
    now_unix_s: float,
) -> Verdict:
    """The verdict on ``plan``, whose shape was checked before.

    ``nodes`` (as seen here: :mod:`dht.records.sightings`) and ``links`` are the records;
    ``running`` is the plan followed now; ``gone`` are peers that have records but do not answer,
    ``changed`` those that offered something else a moment ago.
    """
    usable = usable_nodes(nodes, plan.model, gone | frozenset(plan.silent))
    problem = problem_of(plan.model, usable, links)
    wrong = _misordered(plan) or _beyond_announced(
        plan, {p: r for p, r in usable.items() if p not in changed}, links
    )
    if wrong:
        return Verdict(opinion=Opinion.IMPOSSIBLE, reason=wrong)
    known = [a for a in plan.assignments if a.peer_id in usable]
    gaps = uncovered(known, plan.model.layers)
    if gaps:
        return Verdict(
            opinion=Opinion.UNSURE, reason=f"no peer that is known here holds layers {gaps}"
        )
    if _as_it_is(plan, usable, running):
        most = solve_flow(problem, known).flow_tokens_per_s
        share, what, yardstick = FLOW_USED_MIN, "the same placement", most
        served = _supported(plan, frozenset(usable))
    else:
        share, what = REVIEW.greedy_share_min, "the greedy placement"
        yardstick = _greedy_serves(plan, _long_known(usable, now_unix_s), links)
        served = _serves(plan, problem)
    if served < share * yardstick:
        return Verdict(
            # Flow over peers that are not seen here was not counted, yet they may exist.
            opinion=Opinion.WORSE if len(known) == len(plan.assignments) else Opinion.UNSURE,
            reason=f"it serves {served:.1f} tokens/s, {what} {yardstick:.1f}",
        )
    return FINE


def falls_short(
    plan: Plan,
    usable: Mapping[str, NodeRecord],
    settled: Mapping[str, NodeRecord],
    links: Mapping[str, LinksRecord],
) -> bool:
    """Whether a running plan serves less than its share of what the greedy placement would with
    the ``settled`` peers of ``usable``, for whom alone others need be moved."""
    usable, counted = (
        {p: r for p, r in each.items() if p not in plan.silent} for each in (usable, settled)
    )
    wanted = REVIEW.running_share_min * _greedy_serves(plan, counted, links)
    return _serves(plan, problem_of(plan.model, usable, links)) < wanted


def _long_known(usable: Mapping[str, NodeRecord], now_unix_s: float) -> dict[str, NodeRecord]:
    """The peers of ``usable`` that were here long enough that a plan should count them."""
    return {
        peer_id: record
        for peer_id, record in usable.items()
        if now_unix_s - record.joined_unix_s >= REVIEW.known_for_s
    }


def _greedy_serves(
    plan: Plan, known: Mapping[str, NodeRecord], links: Mapping[str, LinksRecord]
) -> float:
    """Tokens/s that the greedy placement serves on the ``known`` peers."""
    if not known:
        return 0.0
    problem = problem_of(plan.model, known, links)
    spans = greedy(problem)
    if spans is None:
        return 0.0
    edges = solve_flow(problem, spans).edges
    return estimate(problem, spans, edges, announced_service(problem)).tokens_per_s


def _serves(plan: Plan, problem: Problem) -> float:
    """Tokens/s that the plan serves over the peers of ``problem`` alone."""
    known = frozenset(node.peer_id for node in problem.nodes)
    edges = known_part(plan.edges, plan.assignments, known)
    held = [a for a in plan.assignments if a.peer_id in known]
    return estimate(problem, held, edges, announced_service(problem)).tokens_per_s


def known_part(
    edges: Sequence[FlowEdge], assignments: Sequence[Assignment], known: frozenset[str]
) -> tuple[FlowEdge, ...]:
    """The flow that passes ``known`` peers only, by the shares of each peer's in- and outflow.

    Linear in the edges.
    """
    order = {a.peer_id: a.end for a in assignments}

    def shares(forward: bool) -> dict[str, float]:
        """For each peer, the share of its inflow (backward: outflow) over known peers only."""
        share = {SOURCE: 1.0, SINK: 1.0}
        by_near: defaultdict[str, list[tuple[str, float]]] = defaultdict(list)
        for edge in edges:
            near, far = (edge.head, edge.tail) if forward else (edge.tail, edge.head)
            by_near[near].append((far, edge.tokens_per_s))
        for peer in sorted(order, key=lambda p: order[p] if forward else -order[p]):
            whole = sum(flow for _, flow in by_near[peer])
            clean = sum(flow * share.get(far, 0.0) for far, flow in by_near[peer])
            share[peer] = clean / whole if whole > 0 and peer in known else 0.0
        return share

    brought, taken = shares(forward=True), shares(forward=False)
    return tuple(
        replace(edge, tokens_per_s=flow)
        for edge in edges
        if (flow := edge.tokens_per_s * brought[edge.tail] * taken[edge.head]) > 0
    )


def _misordered(plan: Plan) -> str:
    """The error in the plan's waves; "": none."""
    peers = [peer_id for wave in plan.waves for peer_id in wave]
    if len(set(peers)) != len(peers):
        return "a peer moves in two waves"
    if not set(peers) <= {a.peer_id for a in plan.assignments}:
        return "a peer moves that is given no layers"
    return ""


def _beyond_announced(
    plan: Plan,
    usable: Mapping[str, NodeRecord],
    links: Mapping[str, LinksRecord],
) -> str:
    """The first peer that the plan gives more than it announced, or link with more flow than was
    measured; "": none. Peers that are not among ``usable`` are not looked at.

    Linear in the edges.
    """
    planner_nodes = {node.peer_id: node for node in problem_of(plan.model, usable, {}).nodes}
    for a in plan.assignments:
        node = planner_nodes.get(a.peer_id)
        if node is not None and not fits(plan.model, node, a.start, a.end):
            return f"[{a.start}, {a.end}) does not fit {a.peer_id}"
    through: defaultdict[str, float] = defaultdict(float)
    for edge in plan.edges:
        through[edge.head] += edge.tokens_per_s
    for a in plan.assignments:
        record = usable.get(a.peer_id)
        if record is None:
            continue
        rate = record.tokens_per_s[a.end - a.start - 1]
        if through[a.peer_id] > REVIEW.rate_slack * rate:
            return f"{a.peer_id} carries {through[a.peer_id]:.1f} of its {rate:.1f} tokens/s"
    measured = {
        (link.source, link.target): link.bandwidth_bytes_per_s
        for author, record in links.items()
        for link in record.links
        if link.target == author
    }
    for edge in plan.edges:
        bandwidth = measured.get((edge.tail, edge.head))
        bytes_per_s = edge.tokens_per_s * plan.model.activation_bytes
        if bandwidth is not None and bytes_per_s > REVIEW.link_slack * bandwidth:
            return f"the link {edge.tail} to {edge.head} carries {bytes_per_s:.0f} bytes/s"
    return ""


def _as_it_is(plan: Plan, usable: Mapping[str, NodeRecord], running: Plan | None) -> bool:
    """Whether the plan moves nobody: from the running plan's layers, or from those announced."""
    held = running.assignments if running is not None else ()
    staying = {a for a in held if a.peer_id in usable}
    if staying and staying <= set(plan.assignments):
        return True
    serving = {
        Assignment(peer_id=peer_id, start=record.start, end=record.end)
        for peer_id, record in usable.items()
        if record.state is NodeState.SERVING
    }
    return bool(serving) and serving <= set(plan.assignments)


def _supported(plan: Plan, known: frozenset[str]) -> float:
    """Lower bound on the plan's flow that passes known peers only, in tokens/s."""
    unknown = sum(
        edge.tokens_per_s for edge in plan.edges if edge.head not in known | {SOURCE, SINK}
    )
    return plan.flow_tokens_per_s - unknown
