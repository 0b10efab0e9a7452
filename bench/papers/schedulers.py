"""Swarm's rule, random choice and the shortest queue, which Helix compares with.

They choose hop by hop in Helix's simulator; here they use what is known at arrival.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from bench.papers.helix_swarm import HelixLink, HelixSwarm
from coordinator.simulator.clients import GROWN, Growth
from coordinator.simulator.core.parts import SimulatedPiece, SimulatedSession, Stage
from coordinator.simulator.core.profiles import Profiles
from dht.messages.types import SINK, SOURCE, Assignment

SWARM_FIRST_S = 0.05
SWARM_SMOOTHING = 0.8
"""Weight of the newest time in Swarm's moving average, as Helix's simulator sets it."""


class HopByHop:
    """Chooses a route vertex by vertex among the links of a placement, without KV accounts."""

    def __init__(
        self,
        assignments: Sequence[Assignment],
        links: Iterable[tuple[str, str]],
        choose: Callable[[str, list[str]], str],
    ) -> None:
        self._ends = {a.peer_id: a.end for a in assignments}
        self._heads: dict[str, list[str]] = {}
        for tail, head in links:
            self._heads.setdefault(tail, []).append(head)
        self._choose = choose

    def route(self, session: SimulatedSession, _now_s: float) -> list[Stage] | None:
        stages: list[Stage] = []
        at, layer = SOURCE, 0
        while True:
            at = self._choose(at, self._heads[at])
            if at == SINK:
                return stages
            stages.append((at, layer, self._ends[at]))
            layer = self._ends[at]

    def decode(self, _session: SimulatedSession, _now_s: float) -> Growth:
        """Do nothing: there are no accounts."""
        return GROWN

    def ended(self, session: SimulatedSession) -> None:
        """Do nothing: there are no accounts."""


def shortest_queue(
    engine: HelixSwarm, draw: Callable[[int], int]
) -> Callable[[str, list[str]], str]:
    """A function that chooses the next peer with the fewest waiting pieces; ties by ``draw``."""

    def waiting(name: str) -> int:
        peer = engine.peers[name]
        queued = sum(len(segment.queue) for segment in peer.segments)
        return queued + sum(
            1 for link in peer.inbound for piece in link.arrivals if piece.arrives_s <= engine.now_s
        )

    def choose(_at: str, heads: list[str]) -> str:
        if SINK in heads:
            return SINK
        lengths = [waiting(name) for name in heads]
        best = [n for n, length in zip(heads, lengths, strict=True) if length == min(lengths)]
        return best[draw(len(best))]

    return choose


class SwarmChoice:
    """Swarm's rule (SWARM Parallelism, Appendix C): the least sum of expected times goes next.

    Each next peer of a vertex has a priority value. A choice of the peer raises it by the moving
    average of the peer's time, from the start of a piece's transfer to the end of the peer's step.
    """

    def __init__(self, engine: HelixSwarm) -> None:
        self._time: dict[tuple[str, str], float] = {}
        self._priority: dict[str, dict[str, float]] = {}
        engine.watch = self._observe

    def __call__(self, at: str, heads: list[str]) -> str:
        priority = self._priority.setdefault(at, dict.fromkeys(heads, SWARM_FIRST_S))
        best = min(heads, key=lambda name: (priority[name], name))
        priority[best] += self._time.get((at, best), SWARM_FIRST_S)
        return best

    def _observe(self, batch: list[SimulatedPiece], now_s: float) -> None:
        for piece in batch:
            link: HelixLink | None = piece.hop.came_by
            if link is None:
                continue
            pair = link.source, link.target.name
            before = self._time.get(pair, SWARM_FIRST_S)
            took_s = now_s - piece.sent_s
            self._time[pair] = SWARM_SMOOTHING * took_s + (1 - SWARM_SMOOTHING) * before


def even_cards(
    profiles: Profiles, links: Sequence[tuple[str, str]]
) -> Callable[[str, str, float], float]:
    """Bandwidth with a sender's network card shared evenly, as in Helix for Swarm and random."""
    count: Mapping[str, int] = {
        tail: sum(1 for other, _ in links if other == tail) for tail, _ in links
    }

    def rate(source: str, _target: str, bytes_per_s: float) -> float:
        if source not in profiles.peers:
            return bytes_per_s
        card = profiles.peers[source].out_bytes_per_s
        return min(bytes_per_s, card / max(1, count.get(source, 1)))

    return rate if count else lambda _source, _target, bytes_per_s: min(bytes_per_s, math.inf)
