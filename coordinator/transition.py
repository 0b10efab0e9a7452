"""When to plan again, and whether a new plan is worth the moves. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

from dht.types import NodeRecord, NodeState, Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class TransitionConfig:
    """Times in seconds."""

    settle_s: float = 0.9
    """Joins are gathered for so long before a plan is made for them."""
    settle_max_s: float = 5.0
    """…but a plan is not put off longer than this by joins that keep coming."""
    period_s: float = 60.0
    retry_s: float = 5.0
    """After a solve that led to no plan, the next one waits so long."""
    elder_s: float = 300.0
    """Peers that have been here for so long coordinate before others do."""
    gain_min: float = 1.1
    """A plan that moves peers is adopted for so much more flow, or when layers are lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What differs from when the running plan was made, since when, and when it changed last."""

    joined: frozenset[str]
    lost: frozenset[str]
    since_s: float
    last_s: float


def difference(plan: Plan | None, usable: Mapping[str, NodeRecord]) -> tuple[set[str], set[str]]:
    """``(joined, lost)``: peers that the plan does not know, and holders that are gone."""
    planned = {a.peer_id for a in plan.assignments} if plan is not None else set()
    return set(usable) - planned, planned - set(usable)


def usable_nodes(
    nodes: Mapping[str, NodeRecord], fingerprint: str, silent: frozenset[str]
) -> dict[str, NodeRecord]:
    """Peers that a plan may count on: same weights, not leaving, answering, with room."""
    return {
        peer_id: record
        for peer_id, record in nodes.items()
        if record.state is not NodeState.DRAINING
        and record.model.fingerprint == fingerprint
        and peer_id not in silent
        and record.tokens_per_s
    }


def reason_to_plan(
    plan: Plan | None, change: Change | None, planned_s: float, now_s: float, cfg: TransitionConfig
) -> str | None:
    """Why to solve now, or None.

    ``planned_s`` is when the last solve ended. A lost holder is never waited for; joins settle
    first, so that ten peers that start together get one plan.
    """
    if change is not None and change.lost:
        return "a peer left"
    if change is not None and change.joined:
        settled = now_s - change.last_s >= cfg.settle_s
        if settled or now_s - change.since_s >= cfg.settle_max_s:
            return "a peer joined" if plan is not None else "the first plan"
        return None
    if plan is not None and now_s - planned_s >= cfg.period_s:
        return "periodic"
    return None


def elders(
    nodes: Mapping[str, NodeRecord], now_unix_s: float, cfg: TransitionConfig
) -> frozenset[str]:
    """Peers that say they have been here for long; none in a young swarm."""
    return frozenset(
        peer_id
        for peer_id, record in nodes.items()
        if now_unix_s - record.joined_unix_s >= cfg.elder_s
    )


def choose_plan(
    old: Plan | None,
    best: Plan,
    kept: Plan | None,
    usable: Mapping[str, NodeRecord],
    cfg: TransitionConfig,
) -> tuple[Plan, str] | None:
    """The plan to run next and why, or None to stay with ``old``.

    ``kept`` is the plan that moves nobody who holds layers, None where layers would be lost. The
    best plan is worth its moves for 10% more flow; otherwise who stays is not moved, also when
    somebody else left (or one death makes all survivors fetch their weights anew).
    """
    worth = kept is None or best.flow_tokens_per_s >= cfg.gain_min * kept.flow_tokens_per_s
    plan = best if worth or kept is None else kept
    if old is None:
        return plan, "there was no plan"
    joined, lost = difference(old, usable)
    if lost:
        return plan, f"{len(lost)} peer{'s' if len(lost) > 1 else ''} left"
    now = {(a.peer_id, a.start, a.end) for a in old.assignments}
    then = {(a.peer_id, a.start, a.end) for a in plan.assignments}
    if now == then:
        return None
    if now < then:
        return plan, f"{len(joined)} peer{'s' if len(joined) > 1 else ''} joined, nobody moves"
    before = kept.flow_tokens_per_s if kept is not None else old.flow_tokens_per_s
    if plan is best and worth:
        return plan, f"{plan.flow_tokens_per_s / max(before, 1e-9):.2f} times the flow"
    return None
