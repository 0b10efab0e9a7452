"""Judges chains by the estimate, and remembers what it found. Pure.

Chains share no peer, so each is judged by itself: a move changes one or two. Those that pass the
same shared uplink serve together what that carries. What surely serves too little, or most probably
does, is not estimated at all.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from coordinator.evaluation.estimate import (
    Estimate,
    added,
    ceiling,
    estimate,
    row_bytes_per_token,
    together,
)
from coordinator.evaluation.max_flow import balanced_flow
from coordinator.evaluation.shared_uplinks import Way, edge_flows, kept_shares, shared_uplinks
from coordinator.planning.search.chain_dp import Chain, Chains
from coordinator.planning.search.ring_rate import RingRates
from coordinator.problem.service import Service
from dht.messages.types import SOURCE, FlowEdge, Problem


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
    sure_share: float = 0.75
    """Share of these ratios that the guess with its margin covers. With 0.9 and a tenth more on
    top, plans of 3 s for 11 clusters of homes served 7% less by the estimate, as the geometric
    mean."""
    margin_first: float = 1.2
    """The margin before there are ratios: near good chains, few changes give any."""
    ratio_max: float = 1e3
    """Maximum ratio of estimate and guess, either way, that is learned from: over a link of 1e-200
    bytes/s it says nothing of other chains."""


JUDGING = JudgeConfig()


class Judge:
    """The tokens/s of chains by the estimate, and a guess at them in a small part of its time."""

    def __init__(self, problem: Problem, service: Service):
        self.problem = problem
        self.service = service
        self._known: dict[Chain, _Judged] = {}
        self._ring_rates = RingRates(problem, service)
        self._rates: dict[Chain, float] = {}
        self._ratio_at: dict[int, float] = {}
        self._errors, self._near_errors = _Errors(), _Errors()
        self._ceilings: dict[tuple[str, int], float] = {}
        self._shared = shared_uplinks(problem)
        self._row_bytes = row_bytes_per_token(problem, service.workload)

    def __call__(self, chains: Chains, least: float = 0.0, near: Chains = ()) -> float:
        """The chains' tokens/s; 0 once they surely, or most probably, serve less than ``least``.

        Each that is a small change of the one at its place in ``near`` is taken for as many times
        its guess as that one is.
        """
        alone = self._alone(chains, least, near)
        if not alone or not self._shared.bytes_per_s:
            return alone
        return self.combined(chains, self._value)

    def combined(self, chains: Sequence[Chain], worth: Callable[[Chain], float]) -> float:
        """The tokens/s of chains at the same time, of which each serves its ``worth`` alone."""
        worths = [worth(chain) for chain in chains]
        if len(chains) < 2 or not self._shared.bytes_per_s:
            return sum(worths)
        uses = [
            {way: each * value for way, each in self.uses_per_token(chain).items()}
            for chain, value in zip(chains, worths, strict=True)
        ]
        kept = kept_shares(worths, uses)
        return sum(value * share for value, share in zip(worths, kept, strict=True))

    def uses_per_token(self, chain: Chain) -> Mapping[Way, float]:
        """The share of each shared uplink that one token/s of a chain takes, prompts included."""
        if not self._shared.bytes_per_s:
            return {}
        judged = self._known.get(chain)
        passes = self._ring_rates.passes(chain) if judged is None else self._passes(judged.edges)
        return {
            way: each * self._row_bytes / max(self._shared.bytes_per_s[way], 1e-9)
            for way, each in passes.items()
        }

    def _passes(self, edges: Sequence[FlowEdge]) -> dict[Way, float]:
        """A token's mean passes over each shared uplink, along a flow."""
        entering = sum(edge.tokens_per_s for edge in edges if edge.tail == SOURCE)
        found = self._shared.passes(edge_flows(edges)) if entering > 0 else {}
        return {way: flow / entering for way, flow in found.items()}

    def _value(self, chain: Chain) -> float:
        judged = self._judged(chain)
        return judged.value if judged is not None else 0.0

    def _alone(self, chains: Chains, least: float, near: Chains) -> float:
        """The sum of the chains' tokens/s, each by itself; 0 once they surely, or most probably,
        serve less than ``least``."""
        before = near if len(near) == len(chains) else (None,) * len(chains)
        new = [pair for pair in zip(chains, before, strict=True) if pair[0] not in self._known]
        total = sum(self._known[chain].value for chain in chains if chain in self._known)
        least *= JUDGING.gain_min
        hopes = [self._hope(*pair) for pair in new] if least > 0 else [0.0] * len(new)
        hoped = sum(hopes)
        for (chain, like), hope in zip(new, hopes, strict=True):
            if total + hoped < least:
                return 0.0
            hoped -= hope
            judged = self._judged(chain, max(0.0, least - total - hoped), like)
            if judged is None:
                return 0.0
            total += judged.value
        return total

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

    def ratio(self, chain: Chain, value: float) -> float:
        """How many times its guess a chain turned out to serve, within ``ratio_max``."""
        most = JUDGING.ratio_max
        guess = self.guess(chain)
        return min(most, max(1 / most, value / guess)) if guess > 0 else most

    def flow(self, chains: Chains) -> tuple[tuple[FlowEdge, ...], Estimate]:
        """The chains' flow and its estimate. Chains that pass the same shared uplinks have as much
        of their flow as of their tokens/s, and no more than the uplinks carry."""
        each = [judged for chain in chains if (judged := self._judged(chain)) is not None]
        flows, served = [judged.edges for judged in each], [judged.served for judged in each]
        if len(each) > 1 and self._shared.bytes_per_s:
            served = together(
                served,
                [
                    {way: use * one.value for way, use in self.uses_per_token(chain).items()}
                    for chain, one in zip(chains, each, strict=True)
                ],
            )
            flows = self._fitting(
                [
                    _scaled(edges, now.tokens_per_s / max(one.value, 1e-12))
                    for edges, now, one in zip(flows, served, each, strict=True)
                ]
            )
        return tuple(edge for edges in flows for edge in edges), added(served)

    def _fitting(self, flows: Sequence[Sequence[FlowEdge]]) -> list[tuple[FlowEdge, ...]]:
        """The flows, each no larger than the shared uplinks carry of all of them."""
        row = max(1, self.problem.model.activation_bytes)
        uses = [
            {
                way: flow * row / max(self._shared.bytes_per_s[way], 1e-9)
                for way, flow in self._shared.passes(edge_flows(edges)).items()
            }
            for edges in flows
        ]
        sums = [sum(e.tokens_per_s for e in edges if e.tail == SOURCE) for edges in flows]
        kept = kept_shares(sums, uses)
        return [_scaled(edges, share) for edges, share in zip(flows, kept, strict=True)]

    def token_s(self, made: dict[Chains, float]) -> float:
        """Time of a token around the ring of the best of the chains ``made``, which are given with
        their worth; 0: there are none."""
        return self.flow(max(made, key=made.__getitem__))[1].token_time_s if made else 0.0

    def _hope(self, chain: Chain, near: Chain | None) -> float:
        """Tokens/s that a chain most probably does not exceed."""
        guess, errors = self._expected(chain, near)
        return min(self._bound(chain), guess * errors.margin if guess > 0 else 0.0)

    def _expected(self, chain: Chain, near: Chain | None) -> "tuple[float, _Errors]":
        """About what a chain would serve, and how far such guesses were off: from what ``near``
        serves, of which it is a small change, where that is known."""
        guess = self.guess(chain)
        if near is None or near not in self._known or (before := self.guess(near)) <= 0:
            return guess, self._errors
        return self._known[near].value * guess / before, self._near_errors

    def _judged(
        self, chain: Chain, needed: float = 0.0, near: Chain | None = None
    ) -> "_Judged | None":
        """A chain's flow and worth; None where it serves less than what is ``needed``."""
        known = self._known.get(chain)
        if known is not None:
            return known
        guess, errors = self._expected(chain, near)
        edges = balanced_flow(self.problem, chain).edges
        served = estimate(self.problem, chain, edges, self.service, needed)
        if served.tokens_per_s < needed:
            return None
        if len(self._known) >= JUDGING.remembered_max:
            self._known.clear()
            self._rates.clear()
        judged = self._known[chain] = _Judged(edges, served)
        if guess > 0 and judged.value > 0:
            errors.add(judged.value / guess)
        self._learn(chain, judged.value)
        return judged

    def _learn(self, chain: Chain, value: float) -> None:
        """Correct the guesses by a chain that was judged."""
        if value <= 0 or self.guess(chain) <= 0:
            return
        depth = _depth(chain)
        ratio = self.ratio(chain, value)
        self._ratio_at[depth] = self._ratio_at.get(depth, 1.0) * ratio**JUDGING.learning

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


class _Errors:
    """What a guess turns out to be worth, as a multiple of itself."""

    def __init__(self) -> None:
        self._ratios: list[float] = []
        self.margin = JUDGING.margin_first
        """Ratio to the guess that chains most probably do not exceed."""

    def add(self, ratio: float) -> None:
        self._ratios.append(ratio)
        if len(self._ratios) % 8 == 0:
            recent = sorted(self._ratios[-JUDGING.recent :])
            self.margin = recent[int(JUDGING.sure_share * (len(recent) - 1))]


@dataclass(frozen=True, slots=True)
class _Judged:
    """A chain's balanced flow and its estimate."""

    edges: tuple[FlowEdge, ...]
    served: Estimate

    @property
    def value(self) -> float:
        return self.served.tokens_per_s


def _scaled(edges: Sequence[FlowEdge], share: float) -> tuple[FlowEdge, ...]:
    """A flow with a share of its tokens/s; without any, no flow."""
    if share >= 1:
        return tuple(edges)
    return tuple(
        replace(edge, tokens_per_s=flow)
        for edge in edges
        if (flow := edge.tokens_per_s * share) > 0
    )


def _depth(chain: Chain) -> int:
    """Number of a chain's stages."""
    return len({a.start for a in chain})
