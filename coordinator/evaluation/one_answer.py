"""The time of a token of one answer that has the swarm to itself, and what that counts. Pure.

It is a sum around the answer's ring: a step of one row at each stage, and each link's delay and the
transfer of one token's activations.
"""

import math
from collections.abc import Collection, Iterable

from coordinator.evaluation.max_flow import bandwidth_bytes_per_s, round_trips_s
from coordinator.policies.routing.quickest import QUICKEST
from coordinator.problem.config import ASSUMED
from coordinator.problem.service import Service
from dht.messages.types import Assignment, FlowEdge, Problem

STEP_S = 0.002
"""Minimum time of a step in seconds beside its layers: receiving, queueing, sending. Peers measure
their layers alone."""


class AnswerTimes:
    """What one answer alone spends at each peer and on each link, in seconds."""

    def __init__(self, problem: Problem, service: Service) -> None:
        self.problem = problem
        self.service = service
        self._rtts = round_trips_s(problem)
        self._bandwidth = bandwidth_bytes_per_s(problem)
        self._layer_s: dict[str, float] = {}

    def stage_s(self, peer: str, layers: int) -> float:
        """Seconds of a step of one row in ``layers`` layers of a peer."""
        machine = self.service.machines[peer]
        if peer not in self._layer_s:
            self._layer_s[peer] = machine.decode.at(1.0, ASSUMED.context_typical)
        run_s = layers * machine.stretch_of(layers) * self._layer_s[peer]
        return max(STEP_S, machine.step_overhead_s) + run_s

    def hop_s(self, tail: str, head: str) -> float:
        """Seconds of a token's activations from one peer to another."""
        return self._link_s(tail, head, self.problem.model.activation_bytes)

    def closing_s(self, last: str, first: str) -> float:
        """Seconds of a token from the last stage to the first, over the hub where there is one."""
        hub = self.service.hub_delay_s
        if last in hub and first in hub:
            return hub[last] + hub[first]
        return self._link_s(last, first, self.problem.token_bytes)

    def _link_s(self, tail: str, head: str, size_bytes: int) -> float:
        if tail == head:
            return 0.0
        bandwidth = self._bandwidth(tail, head)
        transfer_s = size_bytes / bandwidth if bandwidth > 0 else math.inf
        return self._rtts.get((tail, head), self.problem.default_rtt_s) / 2 + transfer_s


def worth(tokens_per_s: float, one_answer_s: float, weight: float) -> float:
    """What a placement is worth, for comparison with others of the same problem alone.

    The weighted geometric mean of its tokens/s under full load and of those of one answer alone:
    ``weight`` is the latter's (:attr:`coordinator.problem.service.Workload.answer_weight`).
    """
    if not weight:
        return tokens_per_s
    return float(tokens_per_s ** (1 - weight) * one_answer_s**-weight)


def tokens_per_s_for(wanted: float, one_answer_s: float, weight: float) -> float:
    """The tokens/s under full load at which :func:`worth` is ``wanted``; ``inf``: there are
    none."""
    if not wanted or not weight:
        return wanted
    if math.isinf(one_answer_s):
        return math.inf
    return float((wanted * one_answer_s**weight) ** (1 / (1 - weight)))


def one_answer_s(
    times: AnswerTimes, assignments: Collection[Assignment], edges: Iterable[FlowEdge]
) -> float:
    """Seconds per token of one answer on the quickest ring along ``edges``, as clients take it.

    ``inf`` where they lead through no whole model. A ring may enter a peer's layers in their
    middle. In a large swarm it begins at the quickest first stages only, as those of clients do
    (:func:`coordinator.policies.routing.quickest.quickest_ring`).
    """
    held = {a.peer_id: a for a in assignments}
    layers = times.problem.model.layers
    after: dict[str, list[Assignment]] = {}
    count = 0
    for edge in edges:
        if edge.tail in held and edge.head in held:
            after.setdefault(edge.tail, []).append(held[edge.head])
            count += 1
    firsts = sorted(
        (a for a in held.values() if a.start == 0),
        key=lambda a: (times.stage_s(a.peer_id, a.end) / a.end, a.peer_id),
    )
    in_order = sorted(held.values(), key=lambda a: (a.end, a.peer_id))
    best_s = math.inf
    for first in firsts[: max(1, QUICKEST.looks_max // max(1, count))]:
        come_s = {first.peer_id: times.stage_s(first.peer_id, first.end)}
        for a in in_order:
            before_s = come_s.get(a.peer_id, math.inf)
            if before_s >= best_s:
                continue
            if a.end == layers:
                best_s = min(best_s, before_s + times.closing_s(a.peer_id, first.peer_id))
            for b in after.get(a.peer_id, ()):
                if b.start <= a.end < b.end:
                    took_s = before_s + times.hop_s(a.peer_id, b.peer_id)
                    took_s += times.stage_s(b.peer_id, b.end - a.end)
                    come_s[b.peer_id] = min(took_s, come_s.get(b.peer_id, math.inf))
    return best_s
