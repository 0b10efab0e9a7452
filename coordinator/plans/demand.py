"""How much of what a swarm can serve is asked for, and what its plans are made for then. Pure.

Demand is the work that last stages did: the tokens that they say they sampled. A client that wants
to look like many has to be served as many. A peer that invents tokens counts with what the plan
gives it at most, so it moves the figure by its own share of the plan alone.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from dht.messages.types import RECORD_BOUNDS, SINK, NodeRecord, Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class DemandConfig:
    """How demand is measured, and from which on it counts as full."""

    window_s: float = 300.0
    """Time constant of the mean: a burst of a minute moves no layers."""
    known_after_s: float = 60.0
    """Time after which the mean counts; before it, a running plan's own figure does."""
    full_share: float = 0.5
    """Share of the plan's throughput from which the swarm counts as full: clients then take most
    routes in turn, and the speed of the quickest ring matters to few."""
    step: float = 0.05
    """Differences of the weight that count: a plan is not made anew for less."""


DEMAND = DemandConfig()


@dataclass(frozen=True, slots=True)
class _Seen:
    tokens: int
    joined_unix_s: float
    at_s: float


class Demand:
    """The mean demand, from records as they come."""

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}
        self._tokens = 0.0
        """Tokens that came, each counted less the longer ago that was."""
        self._began_s: float | None = None
        self._looked_s = 0.0

    def look(self, nodes: Mapping[str, NodeRecord], plan: Plan | None, now_s: float) -> None:
        """Count what came since the last look, by ``nodes`` as they are now."""
        if self._began_s is None:
            self._began_s = self._looked_s = now_s
        self._tokens *= math.exp((self._looked_s - now_s) / DEMAND.window_s)
        self._looked_s = now_s
        most = _given(plan) if plan is not None else {}
        seen, self._seen = self._seen, {}
        for peer, record in nodes.items():
            before = seen.get(peer)
            if before is not None and (before.tokens, before.joined_unix_s) == (
                record.answer_tokens,
                record.joined_unix_s,
            ):
                self._seen[peer] = before
                continue
            self._seen[peer] = _Seen(record.answer_tokens, record.joined_unix_s, now_s)
            if before is None or before.joined_unix_s != record.joined_unix_s:
                continue  # when it did that is not known
            came = record.answer_tokens - before.tokens
            # Who was silent for long says all at once, and none of it is decayed yet.
            limit = most.get(peer, 0.0) * min(now_s - before.at_s, DEMAND.window_s)
            self._tokens += max(0.0, min(came, limit))

    def tokens_per_s(self) -> float | None:
        """The mean rate; None: too little is known yet."""
        if self._began_s is None:
            return None
        known_s = self._looked_s - self._began_s
        if known_s < DEMAND.known_after_s:
            return None
        window_s = DEMAND.window_s
        return self._tokens / (window_s * -math.expm1(-known_s / window_s))

    def answer_weight(self, plan: Plan | None) -> float:
        """The weight of one answer's speed for which to plan now; ``plan`` is the running one.

        A swarm without a plan is new, and counts as idle.
        """
        if plan is None:
            return RECORD_BOUNDS.answer_weight_max
        rate = self.tokens_per_s()
        if rate is None:
            return plan.answer_weight
        share = rate / max(plan.value_tokens_per_s, 1e-9)
        weight = weight_at(share)
        near = abs(weight - plan.answer_weight) < DEMAND.step
        return plan.answer_weight if near else weight


def weight_at(share: float) -> float:
    """The weight of one answer's speed while ``share`` of what the swarm can serve is asked for."""
    return RECORD_BOUNDS.answer_weight_max * max(0.0, 1 - share / DEMAND.full_share)


def _given(plan: Plan) -> dict[str, float]:
    """Tokens/s that the plan gives each last stage under full load."""
    last = [edge for edge in plan.edges if edge.head == SINK]
    scale = plan.value_tokens_per_s / max(sum(edge.tokens_per_s for edge in last), 1e-9)
    return {edge.tail: scale * edge.tokens_per_s for edge in last}


def planned_for(answer_weight: float) -> str:
    """What a plan was made for, in plain words."""
    if answer_weight <= 0:
        return "for a full swarm: only the tokens/s of all together count"
    swarm = (
        "an idle swarm"
        if answer_weight >= RECORD_BOUNDS.answer_weight_max
        else "a swarm with some load"
    )
    given_up = 1 - 2 ** (answer_weight / (answer_weight - 1))
    return (
        f"for {swarm}: an answer that is twice as quick makes up for {given_up:.0%} fewer tokens/s"
        " of all together"
    )
