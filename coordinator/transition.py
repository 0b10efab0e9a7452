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


def reason_to_adopt(
    old: Plan | None, new: Plan, usable: Mapping[str, NodeRecord], cfg: TransitionConfig
) -> str | None:
    """Why ``new`` should replace ``old``, or None to stay."""
    if old is None:
        return "there was no plan"
    joined, lost = difference(old, usable)
    if lost:
        return f"{len(lost)} peers left"
    if new.flow_tokens_per_s >= cfg.gain_min * old.flow_tokens_per_s:
        return f"{new.flow_tokens_per_s / max(old.flow_tokens_per_s, 1e-9):.2f} times the flow"
    kept = {(a.peer_id, a.start, a.end) for a in old.assignments}
    added = {(a.peer_id, a.start, a.end) for a in new.assignments}
    if joined and kept < added:
        return f"{len(joined)} peers joined, nobody moves"
    return None
