"""Judges chains by the estimate, and remembers what it found. Pure.

Chains share no peer, so each is judged by itself: a move changes one or two. What surely serves too
little, or most probably does, is not estimated at all.
"""

import math
from dataclasses import dataclass

from coordinator.evaluation.estimate import Estimate, added, ceiling, estimate
from coordinator.evaluation.max_flow import balanced_flow
from coordinator.problem.service import Service
from coordinator.search.chain_dp import Chain, Chains
from coordinator.search.ring_rate import RingRates
from dht.messages.types import FlowEdge, Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeConfig:
    """What a judge remembers, and when it trusts the ring rate instead of the estimate."""

    remembered_max: int = 20_000
    """Maximum chains whose worth is cached."""
    gain_min: float = 1.0005
    """Minimum ratio by which a chain must raise the throughput."""
    learning: float = 0.3
    """Share of the newest chain in the mean ratio of estimate and ring rate at its depth."""
    recent: int = 64
    """Number of the newest chains whose ratios say how far the guess may be from the estimate."""
    sure_share: float = 0.9
    """Share of these ratios that the guess with its margin covers."""
    margin: float = 1.1
    """Factor on that margin."""


class Judge:
    """The tokens/s of chains by the estimate, and a guess at them in a hundredth of the time."""

    def __init__(self, problem: Problem, service: Service, config: JudgeConfig | None = None):
        self.problem = problem
        self.service = service
        self._config = config or JudgeConfig()
        self._known: dict[Chain, _Judged] = {}
        self._ring_rates = RingRates(problem, service)
        self._rates: dict[Chain, float] = {}
        self._ratio_at: dict[int, float] = {}
        self._ratios: list[float] = []
        self._margin = math.inf
        self._ceilings: dict[tuple[str, int], float] = {}

    def __call__(self, chains: Chains, least: float = 0.0) -> float:
        """The chains' tokens/s; 0 once they surely, or most probably, serve less than ``least``."""
        known = sum(self._known[chain].value for chain in chains if chain in self._known)
        new = [chain for chain in chains if chain not in self._known]
        for chain in new:
            needed = max(0.0, least * self._config.gain_min - known) if len(new) == 1 else 0.0
            judged = self._judged(chain, needed)
            if judged is None:
                return 0.0
            known += judged.value
        return known

    @property
    def known(self) -> dict[Chain, float]:
        """The chains judged so far, with their tokens/s."""
        return {chain: judged.value for chain, judged in self._known.items()}

    def guess(self, chain: Chain) -> float:
        """About what a chain would serve: its ring rate, corrected by what chains as deep turned
        out to serve."""
        rate = self._rates.get(chain)
        if rate is None:
            rate = self._rates[chain] = self._ring_rates(chain)
        return rate * self._ratio_at.get(_depth(chain), 1.0)

    def flow(self, chains: Chains) -> tuple[tuple[FlowEdge, ...], Estimate]:
        """The chains' flow and its estimate."""
        each = [judged for chain in chains if (judged := self._judged(chain)) is not None]
        edges = tuple(edge for judged in each for edge in judged.edges)
        return edges, added([judged.served for judged in each])

    def token_s(self, made: dict[Chains, float]) -> float:
        """Time of a token around the ring of the best of the chains ``made``, which are given with
        their worth; 0: there are none."""
        return self.flow(max(made, key=made.__getitem__))[1].token_time_s if made else 0.0

    def _judged(self, chain: Chain, needed: float = 0.0) -> "_Judged | None":
        """A chain's flow and worth; None where it serves less than what is ``needed``."""
        known = self._known.get(chain)
        if known is not None:
            return known
        if needed > 0 and (
            self._bound(chain) < needed or self.guess(chain) * self._margin < needed
        ):
            return None
        edges = balanced_flow(self.problem, chain).edges
        served = estimate(self.problem, chain, edges, self.service, needed)
        if served.tokens_per_s < needed:
            return None
        if len(self._known) >= self._config.remembered_max:
            self._known.clear()
            self._rates.clear()
        judged = self._known[chain] = _Judged(edges, served)
        self._learn(chain, judged.value)
        return judged

    def _learn(self, chain: Chain, value: float) -> None:
        """Correct the guesses by a chain that was judged."""
        guess, config = self.guess(chain), self._config
        if value <= 0 or guess <= 0:
            return
        self._ratios.append(value / guess)
        depth = _depth(chain)
        self._ratio_at[depth] = self._ratio_at.get(depth, 1.0) * (value / guess) ** config.learning
        if len(self._ratios) % 8 == 0:
            recent = sorted(self._ratios[-config.recent :])
            self._margin = config.margin * recent[int(config.sure_share * (len(recent) - 1))]

    def _bound(self, chain: Chain) -> float:
        """A bound on a chain's tokens/s that needs no flow: what its slowest stage could serve."""
        sums: dict[int, float] = {}
        for a in chain:
            key = a.peer_id, a.end - a.start
            most = self._ceilings.get(key)
            if most is None:
                most = self._ceilings[key] = ceiling(a, self.service)
            sums[a.start] = sums.get(a.start, 0.0) + most
        return min(sums.values())


@dataclass(frozen=True, slots=True)
class _Judged:
    """A chain's balanced flow and its estimate."""

    edges: tuple[FlowEdge, ...]
    served: Estimate

    @property
    def value(self) -> float:
        return self.served.tokens_per_s


def _depth(chain: Chain) -> int:
    """Number of a chain's stages."""
    return len({a.start for a in chain})
