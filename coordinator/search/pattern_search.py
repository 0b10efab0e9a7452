"""Makes candidates with the stage-pattern program: chains of many depths, alone and side by side.

Neither the widest chain nor the shortest serves most: depth costs time, width needs peers. So the
search makes chains of every depth, then combinations of chains over disjoint kinds of peers; the
caller judges them.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from coordinator.search.chain_dp import Chains, disjoint
from coordinator.search.pattern_cpsat import WORK_MAX, widest_chain
from coordinator.search.stage_patterns import StagePattern, Terrain, place_chains, used
from dht.messages.types import Assignment, Problem

DEPTH_STEPS = (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 14, 17, 20, 24, 30, 40, 60)
"""Bounds on a chain's depth, as stages beyond the fewest possible."""
COARSE_STEPS = (0, 1, 3, 6)
"""Bounds on depth for the first pass."""
SUBSETS_MAX = 40
"""Maximum sets of kinds that get chains of their own."""
COPIES_MAX = 3
"""Maximum copies of a chain side by side, each over its share of every kind."""
COMBINED_MAX = 4
"""Maximum combinations of chains over disjoint kinds."""

PatternChain = tuple[StagePattern, ...]
Worth = Callable[[Chains], float]
"""The worth of a candidate; larger is better."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    value: float
    chain: PatternChain
    stages_max: int


def search_patterns(
    problem: Problem,
    *,
    judge: Worth,
    seed: int,
    go_on: Callable[[int], bool],
    work_max: float = WORK_MAX,
    flow_alone: bool = False,
) -> Iterator[Chains]:
    """Placements made of chains, until ``go_on(programs solved)`` is false.

    ``work_max`` bounds one program, in CP-SAT's deterministic seconds. With ``flow_alone``, only
    the chain with the most flow is made.
    """
    search = _Search(problem, judge, seed, go_on, work_max, flow_alone=flow_alone)
    if search.terrain.kinds:
        yield from search.run()


class _Search:
    def __init__(
        self,
        problem: Problem,
        judge: Worth,
        seed: int,
        go_on: Callable[[int], bool],
        work_max: float,
        *,
        flow_alone: bool,
    ) -> None:
        self._judge = judge
        self._seed = seed
        self._go_on = go_on
        self._work_max = work_max
        self._asked = 0
        self._flow_alone = flow_alone
        self.terrain = Terrain(problem)

    def run(self) -> Iterator[Chains]:
        """One chain over all kinds; chains over sets of kinds; copies."""
        all_counts = tuple(self.terrain.counts())
        found = []
        per_set: dict[frozenset[int], _Found] = {}
        everything = frozenset(range(len(all_counts)))
        if not self._flow_alone:
            # Chains over one sort of device are found quickly and hard to beat for small models.
            self._best_of(self._alike(), all_counts, COARSE_STEPS, per_set)
            for parts in disjoint(_values(per_set), COMBINED_MAX):
                yield self._spans([per_set[part].chain for part in parts])
        for one in self._depths(all_counts, DEPTH_STEPS[-1:] if self._flow_alone else DEPTH_STEPS):
            found.append(one)
            yield self._spans([one.chain])
        if self._flow_alone:  # more depth is more flow
            return
        if found:
            per_set[everything] = max(found, key=lambda f: f.value)
        self._best_of(self._sets(), all_counts, DEPTH_STEPS, per_set)
        for parts in disjoint(_values(per_set), COMBINED_MAX):
            yield self._spans([per_set[part].chain for part in parts])
        for copies in range(2, COPIES_MAX + 1):
            yield from self._copies(all_counts, copies)

    def _spans(self, chains: Sequence[PatternChain]) -> Chains:
        placed = place_chains(self.terrain, chains)
        spans: list[tuple[Assignment, ...]] = []
        at = 0
        for chain in chains:
            count = sum(used(self.terrain, chain))
            spans.append(placed[at : at + count])
            at += count
        return tuple(spans)

    def _chain(self, counts: Sequence[int], stages_max: int) -> PatternChain | None:
        if not self._go_on(self._asked):
            return None
        self._asked += 1
        return widest_chain(
            self.terrain,
            counts,
            stages_max,
            seed=self._seed,
            go_on=lambda: self._go_on(self._asked),
            work_max=self._work_max,
        )

    def _best_of(
        self,
        sets: Sequence[frozenset[int]],
        all_counts: Sequence[int],
        steps: Sequence[int],
        per_set: dict[frozenset[int], _Found],
    ) -> None:
        for chosen in sets:
            counts = tuple(n if i in chosen else 0 for i, n in enumerate(all_counts))
            best = max(self._depths(counts, steps), key=lambda f: f.value, default=None)
            if best is not None and (chosen not in per_set or best.value > per_set[chosen].value):
                per_set[chosen] = best

    def _depths(self, counts: tuple[int, ...], steps: Sequence[int]) -> Iterator[_Found]:
        """The widest chain for each bound on depth, until more depth brings no more flow."""
        layers = self.terrain.problem.model.layers
        longest = max(
            (
                len(kind.tokens_per_s)
                for kind, n in zip(self.terrain.kinds, counts, strict=True)
                if n
            ),
            default=0,
        )
        if longest == 0:
            return
        fewest = -(-layers // longest)
        reached = 0
        most = min(layers, sum(counts))
        for bound in sorted({min(fewest + more, most) for more in steps}):
            chain = self._chain(counts, bound)
            if chain is None or len(chain) <= reached:
                continue
            reached = len(chain)
            value = self._judge(self._spans([chain]))
            yield _Found(value=value, chain=chain, stages_max=bound)

    def _copies(self, counts: tuple[int, ...], copies: int) -> Iterator[Chains]:
        share = tuple(n // copies for n in counts)
        for one in self._depths(share, DEPTH_STEPS):
            chains, left = [one.chain] * copies, list(counts)
            for chain in chains:
                left = [a - b for a, b in zip(left, used(self.terrain, chain), strict=True)]
            rest = self._chain(left, one.stages_max + 2) if any(left) else None
            yield self._spans([*chains, rest] if rest else chains)

    def _alike(self) -> list[frozenset[int]]:
        """Sets of kinds that are the same sort of device in any region."""
        sorts: dict[tuple[float, ...], set[int]] = {}
        for i, kind in enumerate(self.terrain.kinds):
            sorts.setdefault(kind.tokens_per_s, set()).add(i)
        return [frozenset(members) for members in sorts.values()]

    def _sets(self) -> list[frozenset[int]]:
        """Sets of kinds that get a chain: regions, one or two sorts, kinds, and complements."""
        every = frozenset(range(len(self.terrain.kinds)))
        sets = [
            frozenset(i for i in every if self.terrain.kinds[i].region == region)
            for region in self.terrain.regions
        ]
        alike = self._alike()
        for size in (1, 2):
            sets += [frozenset().union(*chosen) for chosen in combinations(alike, size)]
        for i in sorted(every):
            sets.append(frozenset({i}))
        found: list[frozenset[int]] = []
        for chosen in sets:
            for candidate in (chosen, every - chosen):
                if candidate and candidate != every and candidate not in found:
                    found.append(candidate)
        return found[:SUBSETS_MAX]


def _values(per_set: dict[frozenset[int], _Found]) -> dict[frozenset[int], float]:
    return {chosen: found.value for chosen, found in per_set.items()}
