"""The stage-pattern program: placements for dozens of unlike peers in a second (CP-SAT).

A *stage* is a set of peers that hold the same layers, a *pattern* is a stage's number of layers
with a count of peers per kind whose summed T_l reaches a target flow F. Which patterns to use, so
that their layers add up to the model's and no kind runs out, is a small program without a variable
per peer, without big-M and without symmetry; bisection on F finds the widest chain. Over several
regions a chain enters and leaves each once, through stages wide enough for the slow links between.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any

from coordinator.flow import bandwidth_bytes_per_s
from coordinator.kinds import Kind
from dht.types import Assignment, Problem

PATTERNS_MAX = 600
"""Patterns per number of layers and region that a program takes, the least wasteful ones."""
WORK_MAX = 0.5
"""Deterministic seconds for one program: the same on every machine."""
WIDTH_MAX = 4
"""Peers that a stage at a border is widened to, beyond what its own flow needs."""
REMEMBERED_MAX = 256
"""Sets of patterns kept for the next program."""
BISECTIONS_MAX = 14
FLOW_WITHIN = 4e-3
"""Where bisection ends, as a share of the flow."""

RoomFor = Callable[[Kind, int], float]
"""A peer's KV room in tokens when it holds so many layers."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A pattern: so many layers held by so many peers of each kind, all in one region."""

    layers: int
    counts: tuple[tuple[int, int], ...]
    """Pairs of a kind's index and a number of its peers."""
    region: int

    @property
    def peers(self) -> int:
        """How many peers stand side by side."""
        return sum(count for _, count in self.counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a chain must keep to besides the peers there are."""

    stages_max: int
    kv_tokens_min: float = 0.0
    """KV room of every stage, in tokens."""


class Terrain:
    """A problem seen as kinds of peers in regions: everything that does not depend on F."""

    def __init__(self, problem: Problem, kinds: Sequence[Kind], room_for: RoomFor) -> None:
        self.problem = problem
        self.kinds = tuple(kinds)
        self.room_for = room_for
        self.regions = tuple(sorted({kind.region for kind in kinds}))
        self.crossing_tokens_per_s = self._crossings()
        self._known: dict[tuple[tuple[int, ...], float, float], tuple[Stage, ...]] = {}

    def _crossings(self) -> dict[tuple[int, int], float]:
        """Tokens/s that a usual link between two regions carries (the median of the pairs)."""
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
        """Peers side by side that a stage at the region's border may need for ``flow``."""
        widest = 1
        for pair, each in self.crossing_tokens_per_s.items():
            if region in pair and 0 < each < flow:
                widest = max(widest, math.ceil(flow / each))
        return min(widest, WIDTH_MAX)

    def patterns(
        self, available: Sequence[int], flow: float, kv_tokens_min: float
    ) -> tuple[Stage, ...]:
        """As :func:`patterns`; bisections for several depths ask for the same ones."""
        key = (tuple(available), flow, kv_tokens_min)
        if key not in self._known:
            if len(self._known) >= REMEMBERED_MAX:
                self._known.clear()
            self._known[key] = tuple(patterns(self, available, flow, kv_tokens_min))
        return self._known[key]

    def counts(self) -> list[int]:
        """Peers of each kind."""
        return [len(kind.peer_ids) for kind in self.kinds]


def patterns(
    terrain: Terrain, available: Sequence[int], flow: float, kv_tokens_min: float
) -> Iterator[Stage]:
    """The stages that reach ``flow`` and the KV room, and would not without any one peer.

    In regions whose links to others are slow, also wider ones, for stages at the border.
    """
    layers = terrain.problem.model.layers
    for region in terrain.regions:
        mine = [i for i, kind in enumerate(terrain.kinds) if kind.region == region and available[i]]
        longest = max((len(terrain.kinds[i].tokens_per_s) for i in mine), default=0)
        for count in range(1, min(longest, layers) + 1):
            able = [
                (rate, terrain.room_for(terrain.kinds[i], count), i)
                for i in mine
                if (rate := terrain.kinds[i].rate(count)) > 0
            ]
            able.sort(key=lambda entry: (-entry[0], entry[2]))
            for peers_min in range(1, terrain.width(region, flow) + 1):
                sums = _Sums(flow=flow, room=kv_tokens_min, peers=peers_min)
                for counts in _covers(able, available, sums)[:PATTERNS_MAX]:
                    stage = Stage(layers=count, counts=counts, region=region)
                    if peers_min in {1, stage.peers}:
                        yield stage


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sums:
    """What the peers of a stage have or must have together."""

    flow: float
    room: float
    peers: int

    def plus(self, count: int, each: tuple[float, float]) -> "_Sums":
        """With ``count`` more peers of this rate and room."""
        return _Sums(
            flow=self.flow + count * each[0],
            room=self.room + count * each[1],
            peers=self.peers + count,
        )

    def reach(self, wanted: "_Sums") -> bool:
        """Whether all of it is there."""
        return self.flow >= wanted.flow and self.room >= wanted.room and self.peers >= wanted.peers


def _covers(
    able: Sequence[tuple[float, float, int]], available: Sequence[int], wanted: _Sums
) -> list[tuple[tuple[int, int], ...]]:
    """Minimal multisets of kinds that reach what is wanted, the least wasteful first."""
    found: list[tuple[float, tuple[tuple[int, int], ...]]] = []
    each = {kind: (rate, room) for rate, room, kind in able}
    nothing = _Sums(flow=0.0, room=0.0, peers=0)
    # What the kinds from here on could still add: branches that cannot reach the sums end at once.
    left = [nothing]
    for _, _, kind in reversed(able):
        left.append(left[-1].plus(available[kind], each[kind]))
    left.reverse()

    def extend(at: int, have: _Sums, chosen: tuple[tuple[int, int], ...]) -> None:
        if have.reach(wanted):
            if not any(have.plus(-1, each[kind]).reach(wanted) for kind, _ in chosen):
                found.append((have.flow, chosen))
            return
        rest = left[at]
        most = _Sums(
            flow=have.flow + rest.flow, room=have.room + rest.room, peers=have.peers + rest.peers
        )
        if at == len(able) or not most.reach(wanted) or len(found) >= 2 * PATTERNS_MAX:
            return
        kind = able[at][2]
        need = 0
        while need < available[kind] and not have.plus(need, each[kind]).reach(wanted):
            need += 1
        for count in range(need, -1, -1):
            more = (*chosen, (kind, count)) if count else chosen
            extend(at + 1, have.plus(count, each[kind]), more)

    extend(0, nothing, ())
    return [chosen for _, chosen in sorted(found)]


def widest_chain(
    terrain: Terrain,
    available: Sequence[int],
    limits: Limits,
    *,
    seed: int,
    go_on: Callable[[], bool] = lambda: True,
) -> tuple[Stage, ...] | None:
    """The chain of stages with the most flow that was found; None where there is none.

    Once ``go_on()`` says no, the best so far is the answer, if there is one.
    """
    layers = terrain.problem.model.layers
    high = sum(
        count * max((j * t for j, t in enumerate(kind.tokens_per_s, start=1)), default=0.0)
        for kind, count in zip(terrain.kinds, available, strict=True)
    )
    high /= layers
    low, best = 0.0, None
    flow = high / 2
    for _ in range(BISECTIONS_MAX):
        found = _Program(terrain, available, flow, limits).solve(seed)
        if found is None:
            high = flow
        else:
            best, low = found, max(flow, chain_flow(terrain, found))
        if high - low <= FLOW_WITHIN * high or (best is not None and not go_on()):
            break
        flow = (low + high) / 2
    return best


def chain_flow(terrain: Terrain, chain: Sequence[Stage]) -> float:
    """Tokens/s of a chain's narrowest stage, by its kinds' rates."""
    return min(
        sum(count * terrain.kinds[kind].rate(stage.layers) for kind, count in stage.counts)
        for stage in chain
    )


class _Program:
    """One feasibility program: how often each pattern is used, and in which role.

    A region that the chain visits has a *head*, the stage that receives from another region or
    holds the model's first layer, and a *tail*, the stage that sends on or holds the last one; one
    stage may be both. Between them only the number of stages of each pattern matters. In a single
    region whose peers hold as much at the model's ends as between them, there are no other roles.
    """

    def __init__(
        self, terrain: Terrain, available: Sequence[int], flow: float, limits: Limits
    ) -> None:
        from ortools.sat.python import cp_model

        self._cp = cp_model
        self._terrain = terrain
        self._model = cp_model.CpModel()
        self._flow = flow
        self._patterns = terrain.patterns(available, flow, limits.kv_tokens_min)
        self._simple = len(terrain.regions) == 1 and not any(
            self._exceeds(pattern, first=True) or self._exceeds(pattern, last=True)
            for pattern in self._patterns
        )
        self._define_roles(available)
        self._define_sums(available, limits)
        if not self._simple:
            self._define_order()

    def _exceeds(self, pattern: Stage, *, first: bool = False, last: bool = False) -> bool:
        """Whether the weights at an end of the model, or between, leave no room for the stage."""
        kinds = (self._terrain.kinds[kind] for kind, _ in pattern.counts)
        return any(
            pattern.layers > (k.first_max if first else k.last_max if last else k.middle_max)
            for k in kinds
        )

    def _define_roles(self, available: Sequence[int]) -> None:
        model = self._model
        self._head, self._tail, self._both, self._middle = {}, {}, {}, {}
        for index, pattern in enumerate(self._patterns):
            most = min(available[kind] // count for kind, count in pattern.counts)
            if self._simple or not self._exceeds(pattern):
                self._middle[index] = model.new_int_var(0, most, "")
            if self._simple:
                continue
            self._head[index] = model.new_bool_var("")
            self._tail[index] = model.new_bool_var("")
            self._both[index] = model.new_bool_var("")

    def _roles(self, index: int) -> list[Any]:
        roles = (self._head, self._tail, self._both, self._middle)
        return [role[index] for role in roles if index in role]

    def _define_sums(self, available: Sequence[int], limits: Limits) -> None:
        model = self._model
        uses = {index: sum(self._roles(index)) for index in range(len(self._patterns))}
        for kind, count in enumerate(available):
            taken = [
                dict(pattern.counts)[kind] * uses[index]
                for index, pattern in enumerate(self._patterns)
                if kind in dict(pattern.counts)
            ]
            if taken:
                model.add(sum(taken) <= count)
        held = sum(p.layers * uses[index] for index, p in enumerate(self._patterns))
        model.add(held == self._terrain.problem.model.layers)
        model.add(sum(uses.values()) <= limits.stages_max)

    def _define_order(self) -> None:
        """Regions follow each other in one path; heads and tails stand at its joints."""
        model, regions = self._model, self._terrain.regions
        self._begin = {r: model.new_bool_var("") for r in regions}
        self._finish = {r: model.new_bool_var("") for r in regions}
        self._cross = {pair: model.new_bool_var("") for pair in permutations(regions, 2)}
        place = {r: model.new_int_var(0, len(regions), "") for r in regions}
        model.add_exactly_one(self._begin.values())
        model.add_exactly_one(self._finish.values())
        for (a, b), crossed in self._cross.items():
            model.add(place[b] == place[a] + 1).only_enforce_if(crossed)
        for r in regions:
            mine = [index for index, p in enumerate(self._patterns) if p.region == r]
            visited = model.new_bool_var("")
            entered = self._begin[r] + sum(self._cross[a, r] for a in regions if a != r)
            left = self._finish[r] + sum(self._cross[r, b] for b in regions if b != r)
            model.add(entered == visited)
            model.add(left == visited)
            model.add(sum(self._head[i] + self._both[i] for i in mine) == visited)
            model.add(sum(self._tail[i] + self._both[i] for i in mine) == visited)
            several = model.new_bool_var("")
            model.add(several == visited - sum(self._both[i] for i in mine))
            for index in mine:
                self._respect_ends(index, r, several)
        for pair, crossed in self._cross.items():
            self._widen(pair, crossed)

    def _respect_ends(self, index: int, region: int, several: Any) -> None:
        """The weights at the model's ends leave a head or a tail room for fewer layers."""
        model = self._model
        pattern = self._patterns[index]
        begins, finishes = self._begin[region], self._finish[region]
        head, tail, both = self._head[index], self._tail[index], self._both[index]

        if index in self._middle:
            model.add(self._middle[index] == 0).only_enforce_if(several.Not())
        else:
            model.add_implication(head, begins)
            model.add_implication(tail, finishes)
            model.add_bool_or(begins, finishes).only_enforce_if(both)
        if self._exceeds(pattern, first=True):
            model.add_bool_or(begins.Not(), head.Not())
            model.add_bool_or(begins.Not(), both.Not())
        if self._exceeds(pattern, last=True):
            model.add_bool_or(finishes.Not(), tail.Not())
            model.add_bool_or(finishes.Not(), both.Not())

    def _widen(self, pair: tuple[int, int], crossed: Any) -> None:
        """Where the chain crosses, there are links enough between the two stages for its flow."""
        model = self._model
        each = self._terrain.crossing_tokens_per_s[pair]
        if each >= self._flow:
            return
        if each <= 0:
            model.add(crossed == 0)
            return
        most = max((p.peers for p in self._patterns), default=0)
        before, after = (model.new_int_var(0, most, "") for _ in range(2))
        ends = ((before, self._tail, pair[0]), (after, self._head, pair[1]))
        for peers, role, region in ends:
            model.add(
                peers
                == sum(
                    p.peers * (role[index] + self._both[index])
                    for index, p in enumerate(self._patterns)
                    if p.region == region
                )
            )
        links = model.new_int_var(0, most * most, "")
        model.add_multiplication_equality(links, [before, after])
        model.add(links >= math.ceil(self._flow / each)).only_enforce_if(crossed)

    def solve(self, seed: int) -> tuple[Stage, ...] | None:
        """The chain's stages in order, or None when none was found within the work allowed."""
        solver = self._cp.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = seed % (1 << 31)
        solver.parameters.max_deterministic_time = WORK_MAX
        if solver.solve(self._model) not in {self._cp.OPTIMAL, self._cp.FEASIBLE}:
            return None
        if self._simple:
            return tuple(self._segment(solver, self._terrain.regions[0]))
        region: int | None = next(r for r, var in self._begin.items() if solver.value(var))
        stages: list[Stage] = []
        while region is not None:
            stages += self._segment(solver, region)
            onward = (b for (a, b), v in self._cross.items() if a == region and solver.value(v))
            region = next(onward, None)
        return tuple(stages)

    def _segment(self, solver: Any, region: int) -> list[Stage]:
        order: list[int] = []
        for role in (self._head, self._middle, self._both, self._tail):
            for index, var in role.items():
                if self._patterns[index].region == region:
                    order += [index] * solver.value(var)
        return [self._patterns[index] for index in order]


def place(terrain: Terrain, chains: Sequence[Sequence[Stage]]) -> tuple[Assignment, ...]:
    """Peers for the stages of chains, peers of a kind in the order of their names."""
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


def used(terrain: Terrain, chain: Sequence[Stage]) -> list[int]:
    """How many peers of each kind a chain takes."""
    taken = [0] * len(terrain.kinds)
    for stage in chain:
        for kind, count in stage.counts:
            taken[kind] += count
    return taken
