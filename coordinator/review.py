"""What a peer makes of a plan that somebody published, by the records that it sees itself. Pure.

:func:`coordinator.check.check_shape` finds what is wrong with a plan by itself. Here it is held
against the world: peers that exist, memory and speed that they announced, and a yardstick that
costs little, Petals' greedy placement. Records differ between peers and moments, hence the slack.
A plan is advice: refusing one costs efficiency at most.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from coordinator.check import FLOW_USED_MIN, uncovered
from coordinator.flow import solve_flow
from coordinator.heuristics import greedy
from coordinator.problem import problem_of
from coordinator.transition import usable_nodes
from dht.types import (
    SINK,
    SOURCE,
    Assignment,
    LinksRecord,
    NodeRecord,
    NodeState,
    Plan,
    PlannerNode,
    fits,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReviewConfig:
    """Slack for what peers see differently."""

    rate_slack: float = 1.1
    """Peers may carry so much more than they announced, times."""
    link_slack: float = 4.0
    """Links are measured anew all the time."""
    greedy_share_min: float = 0.5
    """A plan's flow must be so much of the greedy placement's. Less than all of it, since the plan
    that serves the most is often not the one with the most flow (:mod:`coordinator.estimate`)."""
    known_for_s: float = 30.0
    """Peers that joined less long ago may be missing in a plan."""


class Opinion(StrEnum):
    """What a peer thinks of a plan."""

    FINE = "fine"
    UNSURE = "unsure"
    """It counts on peers that are not known here, or not yet."""
    IMPOSSIBLE = "impossible"
    WORSE = "worse"
    """…than the greedy placement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """An opinion with its reason."""

    opinion: Opinion
    reason: str = ""


FINE = Verdict(opinion=Opinion.FINE)


def review(
    plan: Plan,
    nodes: Mapping[str, NodeRecord],
    links: Mapping[str, LinksRecord],
    *,
    running: Plan | None,
    gone: frozenset[str],
    now_unix_s: float,
    config: ReviewConfig,
) -> Verdict:
    """What to think of ``plan``, whose shape is right.

    ``nodes`` and ``links`` are the records seen; ``running`` is the plan that is followed now;
    ``gone`` are peers that do not answer though they have records.
    """
    usable = usable_nodes(nodes, plan.model.fingerprint, gone)
    problem = problem_of(plan.model, usable, links)
    planner_nodes = {node.peer_id: node for node in problem.nodes}
    for a in plan.assignments:
        node = planner_nodes.get(a.peer_id)
        if node is not None and not fits(plan.model, node, a.start, a.end):
            return _impossible(f"[{a.start}, {a.end}) does not fit {a.peer_id}")
    wrong = _misordered(plan) or _overloaded(plan, usable, links, config)
    if wrong:
        return _impossible(wrong)
    known = [a for a in plan.assignments if a.peer_id in usable]
    gaps = uncovered(known, plan.model.layers)
    if gaps:
        return Verdict(
            opinion=Opinion.UNSURE, reason=f"no peer that is known here holds layers {gaps}"
        )
    if _as_it_is(plan, nodes, running):
        most = solve_flow(problem, known).flow_tokens_per_s
        share, what, yardstick = FLOW_USED_MIN, "the same placement", most
    else:
        share, what = config.greedy_share_min, "the greedy placement"
        yardstick = _greedy_flow(plan, usable, links, now_unix_s, config)
    served = _supported(plan, frozenset(usable))
    if served < share * yardstick:
        return Verdict(
            opinion=Opinion.WORSE,
            reason=f"it serves {served:.1f} tokens/s, {what} {yardstick:.1f}",
        )
    return FINE


def falls_short(
    plan: Plan,
    usable: Mapping[str, NodeRecord],
    links: Mapping[str, LinksRecord],
    now_unix_s: float,
    config: ReviewConfig,
) -> bool:
    """Whether a running plan serves less than its share of what the greedy placement would."""
    wanted = config.greedy_share_min * _greedy_flow(plan, usable, links, now_unix_s, config)
    return _supported(plan, frozenset(usable)) < wanted


def _greedy_flow(
    plan: Plan,
    usable: Mapping[str, NodeRecord],
    links: Mapping[str, LinksRecord],
    now_unix_s: float,
    config: ReviewConfig,
) -> float:
    """What the greedy placement serves on peers that have been here for a while, in tokens/s."""
    long_known = {
        peer_id: record
        for peer_id, record in usable.items()
        if now_unix_s - record.joined_unix_s >= config.known_for_s
    }
    if not long_known:
        return 0.0
    problem = problem_of(plan.model, long_known, links)
    spans = greedy(replace(problem, nodes=tuple(_forget(node) for node in problem.nodes)))
    return 0.0 if spans is None else solve_flow(problem, spans).flow_tokens_per_s


def _impossible(reason: str) -> Verdict:
    return Verdict(opinion=Opinion.IMPOSSIBLE, reason=reason)


def _forget(node: PlannerNode) -> PlannerNode:
    return replace(node, current=None)


def _misordered(plan: Plan) -> str:
    """What is wrong with the waves; "" when nothing is."""
    peers = [peer_id for wave in plan.waves for peer_id in wave]
    if len(set(peers)) != len(peers):
        return "a peer moves in two waves"
    if not set(peers) <= {a.peer_id for a in plan.assignments}:
        return "a peer moves that is given no layers"
    return ""


def _overloaded(
    plan: Plan,
    usable: Mapping[str, NodeRecord],
    links: Mapping[str, LinksRecord],
    config: ReviewConfig,
) -> str:
    """Whose announced speed or measured link carries more than it can; linear in the edges."""
    through: defaultdict[str, float] = defaultdict(float)
    for edge in plan.edges:
        through[edge.head] += edge.tokens_per_s
    for a in plan.assignments:
        record = usable.get(a.peer_id)
        if record is None:
            continue
        rate = record.tokens_per_s[a.end - a.start - 1]
        if through[a.peer_id] > config.rate_slack * rate:
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
        if bandwidth is not None and bytes_per_s > config.link_slack * bandwidth:
            return f"the link {edge.tail} to {edge.head} carries {bytes_per_s:.0f} bytes/s"
    return ""


def _as_it_is(plan: Plan, nodes: Mapping[str, NodeRecord], running: Plan | None) -> bool:
    """Whether the plan leaves everything as it is: it was only published anew."""
    if running is not None and set(plan.assignments) == set(running.assignments):
        return True
    serving = {
        Assignment(peer_id=peer_id, start=record.start, end=record.end)
        for peer_id, record in nodes.items()
        if record.state is NodeState.SERVING
    }
    return bool(serving) and serving <= set(plan.assignments)


def _supported(plan: Plan, known: frozenset[str]) -> float:
    """What of the plan's flow surely goes over known peers only, in tokens/s."""
    unknown = sum(
        edge.tokens_per_s for edge in plan.edges if edge.head not in known | {SOURCE, SINK}
    )
    return plan.flow_tokens_per_s - unknown
