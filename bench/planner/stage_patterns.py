"""Enumerates stage patterns, from which a CP-SAT program places dozens of unlike peers in a second:
a rival of the planner, which serves as much without them, within 1%
(docs/measured-once.md).

A *stage* is a set of peers that hold the same layers; a *pattern* is a stage's number of layers
with a count of peers per kind whose summed T_l reaches a target flow F.
:mod:`bench.planner.pattern_cpsat` finds the patterns that make a chain.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations

from bench.planner.peer_classes import peer_classes
from coordinator.evaluation.max_flow import bandwidth_bytes_per_s
from coordinator.planning.heuristics.peer_regions import regions
from dht.messages.types import Assignment, Problem

PATTERNS_MAX = 600
"""Maximum patterns in a program per number of layers and region; the least wasteful are kept."""
WIDTH_MAX = 4
"""Maximum number of peers to which a stage at a region's border is widened."""


@dataclass(frozen=True, slots=True)
class StagePattern:
    """A stage's number of layers and its number of peers of each kind, all in one region."""

    layers: int
    counts: tuple[tuple[int, int], ...]
    """Pairs of a kind's index and a number of its peers."""
    region: int

    @property
    def peers(self) -> int:
        """The number of peers side by side."""
        return sum(count for _, count in self.counts)


class Terrain:
    """A problem as kinds of peers in regions: everything that does not depend on F."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.kinds = peer_classes(problem, regions(problem))
        self.regions = tuple(sorted({kind.region for kind in self.kinds}))
        self.crossing_tokens_per_s = self._crossings()

    def _crossings(self) -> dict[tuple[int, int], float]:
        """Tokens/s of the median link between two regions, for each pair of regions."""
        bandwidth = bandwidth_bytes_per_s(self.problem)
        members: defaultdict[int, list[str]] = defaultdict(list)
        for kind in self.kinds:
            members[kind.region] += kind.peer_ids
        each = max(1, self.problem.model.activation_bytes)
        found = {}
        for a, b in permutations(self.regions, 2):
            rates = sorted(bandwidth(x, y) / each for x in members[a][:16] for y in members[b][:16])
            found[a, b] = rates[len(rates) // 2]
        return found

    def width(self, region: int, flow: float) -> int:
        """Maximum peers side by side that a stage at the region's border may need for ``flow``."""
        widest = 1
        for pair, each in self.crossing_tokens_per_s.items():
            if region in pair and 0 < each < flow:
                widest = max(widest, math.ceil(flow / each))
        return min(widest, WIDTH_MAX)

    def counts(self) -> list[int]:
        """The number of peers of each kind."""
        return [len(kind.peer_ids) for kind in self.kinds]


def patterns(terrain: Terrain, available: Sequence[int], flow: float) -> Iterator[StagePattern]:
    """The minimal stages that reach ``flow``: none can spare a peer.

    In regions whose links to others are slow, also wider stages, for the region's border.
    """
    layers = terrain.problem.model.layers
    for region in terrain.regions:
        mine = [i for i, kind in enumerate(terrain.kinds) if kind.region == region and available[i]]
        longest = max((len(terrain.kinds[i].tokens_per_s) for i in mine), default=0)
        for count in range(1, min(longest, layers) + 1):
            able = [(rate, i) for i in mine if (rate := terrain.kinds[i].rate(count)) > 0]
            able.sort(key=lambda entry: (-entry[0], entry[1]))
            for peers_min in range(1, terrain.width(region, flow) + 1):
                sums = _Sums(flow=flow, peers=peers_min)
                for counts in _covers(able, available, sums)[:PATTERNS_MAX]:
                    stage = StagePattern(layers=count, counts=counts, region=region)
                    if peers_min in {1, stage.peers}:
                        yield stage


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sums:
    """Sums over the peers of a stage: what they have, or must have."""

    flow: float
    peers: int

    def plus(self, count: int, rate: float) -> "_Sums":
        """The sums with ``count`` more peers of this rate."""
        return _Sums(flow=self.flow + count * rate, peers=self.peers + count)

    def reach(self, wanted: "_Sums") -> bool:
        """Whether every sum is at least the wanted one."""
        return self.flow >= wanted.flow and self.peers >= wanted.peers


def _covers(
    able: Sequence[tuple[float, int]], available: Sequence[int], wanted: _Sums
) -> list[tuple[tuple[int, int], ...]]:
    """Minimal multisets of kinds that reach the ``wanted`` sums, the least wasteful first."""
    found: list[tuple[float, tuple[tuple[int, int], ...]]] = []
    each = {kind: rate for rate, kind in able}
    nothing = _Sums(flow=0.0, peers=0)
    # The sums that the remaining kinds could add: a branch that cannot reach the goal ends at once.
    left = [nothing]
    for _, kind in reversed(able):
        left.append(left[-1].plus(available[kind], each[kind]))
    left.reverse()

    def extend(at: int, have: _Sums, chosen: tuple[tuple[int, int], ...]) -> None:
        if have.reach(wanted):
            if not any(have.plus(-1, each[kind]).reach(wanted) for kind, _ in chosen):
                found.append((have.flow, chosen))
            return
        rest = left[at]
        most = _Sums(flow=have.flow + rest.flow, peers=have.peers + rest.peers)
        if at == len(able) or not most.reach(wanted) or len(found) >= 2 * PATTERNS_MAX:
            return
        kind = able[at][1]
        need = 0
        while need < available[kind] and not have.plus(need, each[kind]).reach(wanted):
            need += 1
        for count in range(need, -1, -1):
            more = (*chosen, (kind, count)) if count else chosen
            extend(at + 1, have.plus(count, each[kind]), more)

    extend(0, nothing, ())
    return [chosen for _, chosen in sorted(found)]


def place_chains(
    terrain: Terrain, chains: Sequence[Sequence[StagePattern]]
) -> tuple[Assignment, ...]:
    """The spans of chains: each stage takes peers of its kinds in the order of their names."""
    left = [list(kind.peer_ids) for kind in terrain.kinds]
    placed = []
    for chain in chains:
        at = 0
        for stage in chain:
            for kind, count in stage.counts:
                taken, left[kind] = left[kind][:count], left[kind][count:]
                placed += [
                    Assignment(peer_id=name, start=at, end=at + stage.layers) for name in taken
                ]
            at += stage.layers
    return tuple(placed)


def used(terrain: Terrain, chain: Sequence[StagePattern]) -> list[int]:
    """The number of peers of each kind that a chain takes."""
    taken = [0] * len(terrain.kinds)
    for stage in chain:
        for kind, count in stage.counts:
            taken[kind] += count
    return taken
