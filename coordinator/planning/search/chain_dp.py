"""Finds chains by a dynamic program over peers in a fixed order, in milliseconds, without a solver.

Peers are ordered region by region, and a stage is a run of neighbours in that order. For a target
flow F, a table holds the most layers that the peers i to j can hold side by side while their T_l
add up to F; a dynamic program over the table finds the fewest stages that reach all layers. A
ladder of F, from the bound down, gives deep narrow chains and short wide ones, the same on every
machine at any load.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, permutations, zip_longest
from typing import Any, TypeVar

import numpy as np

from coordinator.evaluation.max_flow import upper_bound
from coordinator.planning.heuristics.heuristics import span_limits
from coordinator.planning.heuristics.peer_regions import regions
from coordinator.planning.search.config import SEARCH
from dht.messages.types import Assignment, PlannerNode, Problem

T = TypeVar("T")

FLOWS = tuple(0.85**step for step in range(18))
"""The ladder of target flows, as shares of the bound."""
FLOWS_FIRST = FLOWS[1::4]
"""A coarser ladder for the first pass."""
NONE = -(10**6)

Chain = tuple[Assignment, ...]
Chains = tuple[Chain, ...]
"""The spans of each chain; flow stays within a chain."""
BoundedWorth = Callable[[Chains, float], float]
"""The worth of chains, or any value below the second argument once the worth is surely below it."""
_Table = Any
"""A numpy integer array; the entry [i, j] is about the peers from i to j - 1."""


def chains_by_dp(
    problem: Problem, *, judge: BoundedWorth, go_on: Callable[[int], bool]
) -> Iterator[Chains]:
    """The best chains over all peers, and over sets of them; each by itself.

    Sets are devices of one sort, regions, and pairs of those: the judge remembers the chains of
    every set, which the master problem then combines. The search ends when ``go_on(chains judged)``
    is false.
    """
    best: dict[frozenset[str], tuple[float, Chain]] = {}
    judged = 0
    region_of = regions(problem)
    sets = _sets(problem, region_of)
    for steps in (FLOWS_FIRST, FLOWS):
        for peers in sets:
            nodes = [node for node in problem.nodes if node.peer_id in peers]
            seen: set[Chain] = set()
            for chain in _ladder(problem, nodes, region_of, steps) if go_on(judged) else ():
                if not go_on(judged):
                    break
                if chain in seen:
                    continue
                seen.add(chain)
                judged += 1
                least = best[peers][0] if peers in best else 0.0
                worth = judge((chain,), least)
                if worth > least:
                    best[peers] = worth, chain
        for chosen in sorted(best, key=lambda chosen: -best[chosen][0])[: SEARCH.alone_max]:
            yield (best[chosen][1],)


def _sets(problem: Problem, region_of: Mapping[str, int]) -> list[frozenset[str]]:
    """Sets of peers: all; sorts of devices, regions and their pairs; complements of those."""
    sorts: dict[object, set[str]] = {}
    for node in problem.nodes:
        sorts.setdefault(node.tokens_per_s, set()).add(node.peer_id)
        sorts.setdefault(region_of[node.peer_id], set()).add(node.peer_id)
    every = frozenset(node.peer_id for node in problem.nodes)
    simple = sorted(
        (frozenset(peers) for peers in sorts.values()), key=lambda s: (-len(s), sorted(s))
    )
    sets = [every, *simple, *(every - s for s in simple)]
    sets += [a | b for a, b in combinations(simple, 2)]
    return [peers for peers in dict.fromkeys(sets) if peers][: SEARCH.sets_max]


def _ladder(
    problem: Problem,
    nodes: Sequence[PlannerNode],
    region_of: Mapping[str, int],
    steps: Sequence[float],
) -> Iterator[Chain]:
    """Chains over ``nodes`` in several orders, from the most flow to the fewest stages."""
    bound = upper_bound(replace(problem, nodes=tuple(nodes), links=()))
    for order in orders(nodes, region_of):
        row = Row(problem, order)
        for peers_min in (1, SEARCH.holders):
            yield from row.ladder([bound * step for step in steps], peers_min)


def orders(
    nodes: Sequence[PlannerNode], region_of: Mapping[str, int]
) -> Iterator[tuple[PlannerNode, ...]]:
    """Orders of the peers by region; within one, largest first, and large and small in turn."""
    present = sorted({region_of[node.peer_id] for node in nodes})
    several = len(present) <= SEARCH.ordered_regions_max
    for turn in permutations(present) if several else [tuple(present)]:
        large_first: list[PlannerNode] = []
        mixed: list[PlannerNode] = []
        for region in turn:
            mine = [node for node in nodes if region_of[node.peer_id] == region]
            mine.sort(key=lambda n: (-len(n.tokens_per_s), [-r for r in n.tokens_per_s], n.peer_id))
            large_first += mine
            half = (len(mine) + 1) // 2
            mixed += [
                n for pair in zip_longest(mine[:half], mine[: half - 1 : -1]) for n in pair if n
            ]
        yield tuple(large_first)
        if mixed != large_first:
            yield tuple(mixed)


class Row:
    """Peers in an order, with the tables that do not depend on the flow."""

    def __init__(self, problem: Problem, order: Sequence[PlannerNode]) -> None:
        self._layers = problem.model.layers
        room = [(node, span_limits(problem, node)) for node in order]
        room = [(node, r) for node, r in room if max(r.first, r.middle, r.last) or r.whole]
        self._order = tuple(node for node, _ in room)
        reaches = [r for _, r in room]
        longest = min(self._layers, max((len(n.tokens_per_s) for n in self._order), default=0))
        rates = np.zeros((longest + 1, len(room) + 1))
        for at, node in enumerate(self._order, start=1):
            known = node.tokens_per_s[:longest]
            rates[1 : len(known) + 1, at] = known
        # A peer is as fast at more layers as at fewer, at most: measurements may say otherwise.
        rates[1:] = np.minimum.accumulate(rates[1:], axis=0)
        self._sums = np.cumsum(rates, axis=1)
        self._between = self._sums[1:, None, :] - self._sums[1:, :, None]
        self._first = _least([r.first for r in reaches])
        self._middle = _least([r.middle for r in reaches])
        self._last = _least([r.last for r in reaches])
        self._whole = _least([self._layers * r.whole for r in reaches])
        self._known: dict[tuple[float, int], tuple[_Table, _Table, _Table, _Table]] = {}

    def chain(self, flow: float, peers_min: int = 1) -> Chain | None:
        """The chain of fewest stages that holds all layers at ``flow`` tokens/s; None: none does.

        Stages follow each other without a gap; peers after the last stage stay unused.
        """
        if not self._order:
            return None
        reach = self._reach(flow, peers_min)
        whole = _within(reach, self._whole)[0]
        if whole.max() >= self._layers:
            last_whole = int(np.flatnonzero(whole >= self._layers)[-1])
            return self._placed([(0, last_whole, self._layers)])
        first, middle, last = (
            _within(reach, caps) for caps in (self._first, self._middle, self._last)
        )
        held = first[0]
        parents: list[_Table] = []
        for _ in range(len(self._order)):
            ended = held[:, None] + last
            if ended.max() >= self._layers:
                i, j = divmod(int(ended.argmax()), ended.shape[1])
                stages = [(i, j, int(last[i, j]))]
                for parent in reversed(parents):
                    i, j = int(parent[i]), i
                    stages.append((i, j, int(middle[i, j])))
                stages.append((0, i, int(first[0, i])))
                return self._placed(stages[::-1])
            grown = held[:, None] + middle
            parents.append(grown.argmax(axis=0))
            held = grown.max(axis=0)
            if held.max() <= 0:
                return None
        return None

    def ladder(self, flows: Sequence[float], peers_min: int) -> list[Chain]:
        """The chains of falling ``flows``: where one has none, larger ones have none either."""
        found: list[Chain] = []
        for flow in reversed(flows):
            chain = self.chain(flow, peers_min)
            if chain is None:
                break
            found.append(chain)
        return found[::-1]

    def cheapest(
        self, flow: float, prices: Mapping[str, float], peers_min: int = 1
    ) -> Chain | None:
        """The chain of the least sum of ``prices`` that holds all layers at ``flow`` tokens/s.

        Peers between stages may stay unused; within a stage all are used. None: there is no chain.
        """
        layers = self._layers
        first, middle, last, whole = self._stages(flow, peers_min)
        paid = np.cumsum([0.0, *(prices.get(node.peer_id, 0.0) for node in self._order)])
        tables = _Tables.empty(len(self._order), layers)
        levels = np.arange(layers + 1)
        best: float = math.inf
        ends: tuple[int, int, int] | None = None
        for j in range(1, len(self._order) + 1):
            spent = paid[j] - paid[:j]
            complete = np.where(whole[:j, j] >= layers, spent, math.inf)
            if complete.min() < best:
                best, ends = float(complete.min()), (int(complete.argmin()), j, layers)
            from_layers = levels[None, :] - middle[:j, j, None]
            grown = np.take_along_axis(tables.held[:j], np.maximum(from_layers, 0), axis=1)
            grown = np.where((from_layers > 0) & (middle[:j, j, None] > 0), grown, math.inf)
            grown += spent[:, None]
            tables.enter(j, first[:j, j], spent, grown)
            lasts = last[:j, j]
            closed = tables.least[np.arange(j), np.maximum(1, layers - lasts)] + spent
            closed = np.where(lasts > 0, closed, math.inf)
            if closed.min() < best:
                i = int(closed.argmin())
                best, ends = float(closed[i]), (i, j, int(lasts[i]))
        if ends is None:
            return None
        i, _, longest = ends
        if longest == layers:
            return self._placed([ends])
        wanted = max(1, layers - longest)
        level = wanted + int(tables.held[i, wanted:layers].argmin())
        return self._placed([*tables.back(i, level, first, middle), ends])

    def _stages(self, flow: float, peers_min: int) -> tuple[_Table, _Table, _Table, _Table]:
        """The most layers that peers i to j - 1 hold side by side at ``flow``: at the beginning,
        in the middle, at the end, and as all layers."""
        key = flow, peers_min
        if key not in self._known:
            reach = self._reach(flow, peers_min)
            caps = (self._first, self._middle, self._last, self._whole)
            first, middle, last, whole = (np.maximum(_within(reach, cap), 0) for cap in caps)
            self._known[key] = first, middle, last, whole
        return self._known[key]

    def _reach(self, flow: float, peers_min: int) -> _Table:
        """The most layers at which peers i to j - 1 reach ``flow`` side by side; 0: at none."""
        ends = np.arange(self._sums.shape[1])
        found = np.count_nonzero(self._between >= flow, axis=0)  # as rates fall with the layers
        found[ends[None, :] - ends[:, None] < peers_min] = 0
        return found

    def _placed(self, stages: Sequence[tuple[int, int, int]]) -> Chain:
        """The spans of the stages; surplus layers are taken from the slowest stage, one by one."""
        lengths = [length for _, _, length in stages]

        def rate(at: int) -> float:
            i, j, _ = stages[at]
            sums = self._sums[lengths[at]]
            return float(sums[j] - sums[i])

        while sum(lengths) > self._layers:
            slowest = min((n for n, length in enumerate(lengths) if length > 1), key=rate)
            lengths[slowest] -= 1
        spans, at = [], 0
        for (i, j, _), length in zip(stages, lengths, strict=True):
            spans += [
                Assignment(peer_id=node.peer_id, start=at, end=at + length)
                for node in self._order[i:j]
            ]
            at += length
        return tuple(spans)


@dataclass(slots=True)
class _Tables:
    """The least costs of a number of layers, held by stages over the first peers of an order.

    Indices are the number of peers and of layers, from 0 to all of them.
    """

    begin: _Table
    """The first peer of the last stage, where that ends before this peer."""
    opening: _Table
    """Whether that stage is the first one, too."""
    held: _Table
    """The least cost of a last stage that ends before this peer or earlier."""
    ended: _Table
    """Where that stage ends."""
    least: _Table
    """The least cost by number of layers: of at least as many, but not of all."""

    @classmethod
    def empty(cls, peers: int, layers: int) -> "_Tables":
        shape = peers + 1, layers + 1
        return cls(
            begin=np.zeros(shape, dtype=int),
            opening=np.zeros(shape, dtype=bool),
            held=np.full(shape, math.inf),
            ended=np.zeros(shape, dtype=int),
            least=np.full(shape, math.inf),
        )

    def enter(self, j: int, first: _Table, spent: _Table, grown: _Table) -> None:
        """Enter the stages that end before peer ``j``: by their first peer, the layers that they
        hold as ``first`` stages, what they cost (``spent``), and the costs of all before and them,
        by layers (``grown``)."""
        layers = self.held.shape[1] - 1
        cost, begin = grown.min(axis=0), grown.argmin(axis=0)
        alone, alone_begin = np.full(layers + 1, math.inf), np.zeros(layers + 1, dtype=int)
        alone[first] = spent  # the fewest peers come last, and win
        alone_begin[first] = np.arange(j)
        alone[0] = math.inf
        self.opening[j] = alone < cost
        cost = np.where(self.opening[j], alone, cost)
        self.begin[j] = np.where(self.opening[j], alone_begin, begin)
        better = cost < self.held[j - 1]
        self.held[j] = np.where(better, cost, self.held[j - 1])
        self.ended[j] = np.where(better, j, self.ended[j - 1])
        self.least[j, :layers] = np.minimum.accumulate(self.held[j, :layers][::-1])[::-1]

    def back(self, i: int, level: int, first: _Table, middle: _Table) -> list[tuple[int, int, int]]:
        """The stages of ``level`` layers that end before peer ``i``, in their order."""
        stages: list[tuple[int, int, int]] = []
        while True:
            j = int(self.ended[i, level])
            i = int(self.begin[j, level])
            if self.opening[j, level]:
                stages.append((i, j, int(first[i, j])))
                return stages[::-1]
            stages.append((i, j, int(middle[i, j])))
            level -= stages[-1][2]


def _within(reach: _Table, caps: _Table) -> _Table:
    """The most layers at which a flow is reached and that fit; ``NONE``: none."""
    found = np.minimum(reach, caps)
    return np.where(found > 0, found, NONE)


def _least(caps: Sequence[int]) -> _Table:
    """The table of ``min(caps[i:j])``; 0 where the slice is empty."""
    table = np.zeros((len(caps) + 1, len(caps) + 1), dtype=int)
    for i in range(len(caps)):
        table[i, i + 1 :] = np.minimum.accumulate(np.array(caps[i:]))
    return table
