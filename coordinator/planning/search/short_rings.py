"""Finds the rings on which one answer alone takes the least time. Pure.

For some first peers a shortest path over (layers held, last peer), in which every peer holds as
much as fits and none comes twice; then layers go to the quicker ones of the ring's peers.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from coordinator.evaluation.one_answer import AnswerTimes
from coordinator.planning.heuristics.heuristics import span_limits, spans_max
from coordinator.planning.search.chain_dp import Chain
from coordinator.planning.search.config import SEARCH
from dht.messages.session import SESSION_BOUNDS
from dht.messages.types import Assignment, PlannerNode, Problem, fits

_Table = Any
"""A numpy array."""


def short_rings(
    times: AnswerTimes, count: int, held_share: float = 1.0
) -> list[tuple[float, Chain]]:
    """The quickest rings over different peers, ``count`` at most, with their seconds per token;
    the quickest first.

    Each ring holds all layers, each at one peer, which holds ``held_share`` of the most layers that
    it can: the fewer, the more sessions it has KV room for.
    """
    problem = times.problem
    nodes = sorted(
        (_thinned(problem, node, held_share) for node in problem.nodes),
        key=lambda node: node.peer_id,
    )
    of_peer = {node.peer_id: node for node in nodes}
    names = [node.peer_id for node in nodes]
    limits = [span_limits(problem, node) for node in nodes]
    layers = problem.model.layers
    found: dict[frozenset[str], tuple[float, Chain]] = {}

    def keep(peers: Sequence[str], lengths: Sequence[int]) -> None:
        chain = _evened(times, [of_peer[peer] for peer in peers], list(lengths))
        took_s, known = ring_s(times, chain), frozenset(peers)
        if known not in found or took_s < found[known][0]:
            found[known] = took_s, chain

    for name, limit in zip(names, limits, strict=True):
        if limit.whole:
            keep([name], [layers])
    if len(nodes) > 1:
        paths = _Paths(times, names, limits)
        firsts = [at for at in range(len(names)) if limits[at].first]
        firsts.sort(key=lambda at: times.stage_s(names[at], limits[at].first) / limits[at].first)
        for first in firsts[: SEARCH.firsts_max]:
            for peers, lengths in paths.of(first):
                keep(peers, lengths)
    return sorted(found.values(), key=lambda ring: ring[0])[:count]


def _thinned(problem: Problem, node: PlannerNode, share: float) -> PlannerNode:
    """The peer with a ``share`` of the layers that it can hold, one at least."""
    most = max(spans_max(problem, node), default=0)
    return replace(node, tokens_per_s=node.tokens_per_s[: max(1, math.ceil(share * most))])


def ring_s(times: AnswerTimes, chain: Chain) -> float:
    """Seconds per token around a chain of one peer per stage."""
    total_s = times.closing_s(chain[-1].peer_id, chain[0].peer_id)
    for at, held in enumerate(chain):
        total_s += times.stage_s(held.peer_id, held.end - held.start)
        if at:
            total_s += times.hop_s(chain[at - 1].peer_id, held.peer_id)
    return total_s


class _Paths:
    """Shortest paths from a first peer to all layers."""

    def __init__(self, times: AnswerTimes, names: Sequence[str], limits: Sequence[Any]) -> None:
        count, self._layers = len(names), times.problem.model.layers
        self._times, self._names, self._limits = times, names, limits
        self._hop_s = np.array([[times.hop_s(a, b) for b in names] for a in names])
        self._hop_s[np.arange(count), np.arange(count)] = math.inf
        self._middle = np.array([limit.middle for limit in limits])
        self._run_s = np.array(
            [
                times.stage_s(name, limit.middle) if limit.middle else math.inf
                for name, limit in zip(names, limits, strict=True)
            ]
        )
        last = np.array([limit.last for limit in limits])
        levels = np.arange(self._layers)
        self._end_s = np.full((self._layers, count), math.inf)
        for at, name in enumerate(names):
            for level in levels[max(1, self._layers - last[at]) :]:
                self._end_s[level, at] = times.stage_s(name, self._layers - int(level))

    def of(self, first: int) -> list[tuple[list[str], list[int]]]:
        """The best path of each number of stages, with each peer's layers."""
        names, layers = self._names, self._layers
        count = len(names)
        took_s = np.full((layers, count), math.inf)
        begun = self._limits[first].first
        took_s[begun, first] = self._times.stage_s(names[first], begun)
        on_path = np.zeros((layers, count, count), dtype=bool)
        on_path[begun, first, first] = True
        paths: dict[tuple[int, int], tuple[int, ...]] = {(begun, first): (first,)}
        closing_s = np.array([self._times.closing_s(name, names[first]) for name in names])
        best_s = math.inf
        found: list[tuple[int, ...]] = []
        for _ in range(SESSION_BOUNDS.stages_max - 1):
            live = np.flatnonzero(np.isfinite(took_s).any(axis=1))
            if not len(live):
                break
            reach = took_s[live][:, :, None] + self._hop_s[None]
            reach = np.where(on_path[live], math.inf, reach)
            tails, reach = reach.argmin(axis=1), reach.min(axis=1)
            ended = reach + self._end_s[live] + closing_s[None]
            at, head = divmod(int(ended.argmin()), count)
            if ended[at, head] < SEARCH.ring_slack * best_s:
                best_s = min(best_s, float(ended[at, head]))
                found.append((*paths[int(live[at]), int(tails[at, head])], head))
            grown_s = reach + self._run_s[None]
            took_s = np.full((layers, count), math.inf)
            before, paths = paths, {}
            next_on = np.zeros_like(on_path)
            rows, heads = np.nonzero(grown_s < SEARCH.ring_slack * best_s)
            for row, head in zip(rows.tolist(), heads.tolist(), strict=True):
                level = int(live[row])
                to = min(layers - 1, level + int(self._middle[head]))
                if to > level and grown_s[row, head] < took_s[to, head]:
                    took_s[to, head] = grown_s[row, head]
                    tail = int(tails[row, head])
                    paths[to, head] = (*before[level, tail], head)
                    next_on[to, head] = on_path[level, tail]
                    next_on[to, head, head] = True
            on_path = next_on
        return [self._placed(path) for path in found]

    def _placed(self, path: Sequence[int]) -> tuple[list[str], list[int]]:
        """The peers of a path and their layers, each with its most and the last with the rest."""
        lengths = [self._limits[path[0]].first]
        for peer in path[1:-1]:
            rest = self._layers - 1 - sum(lengths)
            lengths.append(min(rest, int(self._middle[peer])))
        lengths.append(self._layers - sum(lengths))
        return [self._names[peer] for peer in path], lengths


def _evened(times: AnswerTimes, nodes: Sequence[PlannerNode], lengths: list[int]) -> Chain:
    """The chain after layers moved, one by one, to the peers of the ring that run them sooner."""
    peers, model = [node.peer_id for node in nodes], times.problem.model

    def placed() -> Chain:
        spans, at = [], 0
        for peer, length in zip(peers, lengths, strict=True):
            spans.append(Assignment(peer_id=peer, start=at, end=at + length))
            at += length
        return tuple(spans)

    def gained_s(fast: int, slow: int) -> float:
        """Seconds that the ring gains by one layer that ``fast`` runs instead of ``slow``."""
        before_s = sum(times.stage_s(peers[at], lengths[at]) for at in (fast, slow))
        after_s = times.stage_s(peers[fast], lengths[fast] + 1)
        return before_s - after_s - times.stage_s(peers[slow], lengths[slow] - 1)

    chain = placed()
    order = sorted(range(len(peers)), key=lambda at: times.stage_s(peers[at], 1))
    for fast in order:
        for slow in reversed(order):
            while fast != slow and lengths[slow] > 1 and gained_s(fast, slow) > 0:
                lengths[fast] += 1
                lengths[slow] -= 1
                moved = placed()
                held = zip(nodes, moved, strict=True)
                if not all(fits(model, node, a.start, a.end) for node, a in held):
                    lengths[fast] -= 1
                    lengths[slow] += 1
                    break
                chain = moved
    return chain
