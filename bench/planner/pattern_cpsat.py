"""Finds the chain with the most flow within limits, by a CP-SAT program over stage patterns.

The program chooses patterns whose layers add up to the model's, without using more peers of a kind
than there are. It has no variable per peer, no big-M and no symmetry; bisection on the flow finds
the widest chain. A chain over several regions enters and leaves each once, through stages wide
enough for the slow links between regions.
"""

import math
from collections.abc import Sequence
from itertools import permutations
from typing import Any

from bench.planner.stage_patterns import StagePattern, Terrain, patterns

WORK_MAX = 0.5
"""Maximum work of one program, in CP-SAT's deterministic seconds: the same on every machine."""
BISECTIONS_MAX = 14
FLOW_WITHIN = 4e-3
"""Precision at which bisection ends, as a share of the flow."""


def widest_chain(
    terrain: Terrain,
    available: Sequence[int],
    stages_max: int,
    *,
    seed: int,
    work_max: float = WORK_MAX,
) -> tuple[StagePattern, ...] | None:
    """The chain of at most ``stages_max`` stages with the most flow that was found, or None."""
    layers = terrain.problem.model.layers
    high = sum(
        count * max((j * t for j, t in enumerate(kind.tokens_per_s, start=1)), default=0.0)
        for kind, count in zip(terrain.kinds, available, strict=True)
    )
    high /= layers
    low, best = 0.0, None
    flow = high / 2
    for _ in range(BISECTIONS_MAX):
        found = _Program(terrain, available, flow, stages_max).solve(seed, work_max)
        if found is None:
            high = flow
        else:
            best, low = found, max(flow, chain_flow(terrain, found))
        if high - low <= FLOW_WITHIN * high:
            break
        flow = (low + high) / 2
    return best


def chain_flow(terrain: Terrain, chain: Sequence[StagePattern]) -> float:
    """Tokens/s of a chain's slowest stage, by the rates of its kinds."""
    return min(
        sum(count * terrain.kinds[kind].rate(stage.layers) for kind, count in stage.counts)
        for stage in chain
    )


class _Program:
    """One feasibility program: how often each pattern is used, and in which role.

    A region that the chain visits has a *head*, the stage that receives from another region or
    holds the model's first layer, and a *tail*, the stage that sends on or holds the last layer;
    one stage may be both. Between them only the number of stages of each pattern matters. In a
    single region whose peers hold as many layers at the model's ends as between them, all stages
    have the middle role.
    """

    def __init__(
        self, terrain: Terrain, available: Sequence[int], flow: float, stages_max: int
    ) -> None:
        from ortools.sat.python import cp_model

        self._cp = cp_model
        self._terrain = terrain
        self._model = cp_model.CpModel()
        self._flow = flow
        self._patterns = tuple(patterns(terrain, available, flow))
        self._simple = len(terrain.regions) == 1 and not any(
            self._exceeds(pattern, first=True) or self._exceeds(pattern, last=True)
            for pattern in self._patterns
        )
        self._define_roles(available)
        self._define_sums(available, stages_max)
        if not self._simple:
            self._define_order()

    def _exceeds(self, pattern: StagePattern, *, first: bool = False, last: bool = False) -> bool:
        """Whether some peer of the stage lacks room for it at that end of the model, or between."""
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

    def _define_sums(self, available: Sequence[int], stages_max: int) -> None:
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
        model.add(sum(uses.values()) <= stages_max)

    def _define_order(self) -> None:
        """Require that the regions form one path, with heads and tails at its joints."""
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
        """Forbid heads and tails at the model's ends that lack room for the weights there."""
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
        """Require enough links for the flow between two stages where the chain changes region."""
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

    def solve(self, seed: int, work_max: float) -> tuple[StagePattern, ...] | None:
        """The chain's stages in order; None: none was found within ``work_max``."""
        solver = self._cp.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = seed % (1 << 31)
        solver.parameters.max_deterministic_time = work_max
        if solver.solve(self._model) not in {self._cp.OPTIMAL, self._cp.FEASIBLE}:
            return None
        if self._simple:
            return tuple(self._segment(solver, self._terrain.regions[0]))
        region: int | None = next(r for r, var in self._begin.items() if solver.value(var))
        stages: list[StagePattern] = []
        while region is not None:
            stages += self._segment(solver, region)
            onward = (b for (a, b), v in self._cross.items() if a == region and solver.value(v))
            region = next(onward, None)
        return tuple(stages)

    def _segment(self, solver: Any, region: int) -> list[StagePattern]:
        order: list[int] = []
        for role in (self._head, self._middle, self._both, self._tail):
            for index, var in role.items():
                if self._patterns[index].region == region:
                    order += [index] * solver.value(var)
        return [self._patterns[index] for index in order]
