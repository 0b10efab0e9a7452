"""What a chain would serve, about, in a small part of the estimate's time. Pure.

By Little's law a chain serves as many sessions as its stages have KV for, one token each in the
time of a token around the ring. That time follows from the stages' steps at the batch that the rate
brings, and the links' delays; queues on links and the shape of frames are left to the estimate.

In each stage, peers get sessions by what they and their links pass on, as a balanced flow does, and
what a peer has no KV for goes to the others. So the quick ones are full first: with fewer sessions,
a chain may serve more.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from coordinator.evaluation.estimate import row_bytes_per_token
from coordinator.evaluation.max_flow import (
    bandwidth_bytes_per_s,
    own_rates_bytes_per_s,
    round_trips_s,
)
from coordinator.evaluation.shared_uplinks import Way, shared_uplinks
from coordinator.policies.admission.config import ADMISSION
from coordinator.policies.batching.scheduler import LIMIT_ROWS
from coordinator.problem.service import Curve, Service
from dht.messages.types import Assignment, Problem

NO_LIMIT = (math.inf, math.inf)
Stages = Sequence[Sequence[Assignment]]
PerPeer = Sequence[Sequence[float]]
"""A number for each peer, by stages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RingConfig:
    """The constants of the fixed point of rate and batch."""

    turns: int = 4
    """Turns of the fixed point; each goes half of the way, which is near enough for a guess."""
    wait_steps: float = 0.5
    """Mean wait for a step that is under way, in steps."""
    fullest: float = 0.95
    """Maximum share of a peer's, or a link's, time that is taken to be used."""
    in_flight: tuple[float, ...] = (1.0, 0.64, 0.4)
    """Shares of the sessions that there is KV for with which a chain's rate is tried."""
    rate_min: float = 1e-9
    """Minimum tokens/s that a peer counts as passing on when sessions are shared out."""


RINGS = RingConfig()


@dataclass(slots=True)
class _Visit:
    """A peer's part in the ring; times are in seconds."""

    run: float
    """Layers that it runs, times the stretch."""
    decode: Curve
    prompt_row_s: float
    """Time of a prompt's row, for all its layers."""
    overhead_s: float
    alone_s: float
    """Time of a step with one decode."""
    share: float = 0.0
    """Share of the stage's tokens that this peer runs."""
    step_s: float = 0.0

    def at(self, rate: float, rows_per_token: float) -> float:
        """Find the step's time at ``rate`` tokens/s around the ring; returns the time that a row of
        a prompt takes then."""
        # The search spends much of its time here, hence comparisons instead of min() and max().
        tokens = rate * self.share
        batch, busy = tokens * self.step_s, tokens * rows_per_token * self.prompt_row_s
        free = 1 - (busy if busy < RINGS.fullest else RINGS.fullest)
        plain_s = self.run * self.decode.at(batch if batch > 1.0 else 1.0) + self.overhead_s
        self.step_s = plain_s / free
        return self.prompt_row_s / free


class RingRates:
    """The rates of a problem's chains, in tokens/s."""

    def __init__(self, problem: Problem, service: Service) -> None:
        load = service.workload
        self._problem, self._load, self._machines = problem, load, service.machines
        self._decode: dict[str, Curve] = {}
        self._prompt_row_s: dict[str, float] = {}
        for peer, machine in service.machines.items():
            self._decode[peer] = machine.decode.at_context(
                load.input_tokens + load.output_tokens / 2
            )
            prompt = machine.prompt.at_context(load.input_tokens / 2)
            self._prompt_row_s[peer] = min(prompt.at(rows) / rows for rows in LIMIT_ROWS)
        self._speeds = {node.peer_id: node.tokens_per_s for node in problem.nodes}
        self._rtts = round_trips_s(problem)
        self._bandwidth = bandwidth_bytes_per_s(problem)
        self._own = own_rates_bytes_per_s(problem)
        self._shared = shared_uplinks(problem)
        self._token_bytes = max(1.0, row_bytes_per_token(problem, load))

    def __call__(self, chain: Sequence[Assignment]) -> float:
        """Tokens/s of a chain whose spans are equal or follow each other; 0: no room for KV,
        or a connection that carries nothing."""
        stages = _stages(chain)
        rooms = [[self._sessions(a) for a in stage] for stage in stages]
        most = min(*map(sum, rooms), self._load.requests_max)
        if most <= 0:
            return 0.0
        links = self._link_rates(stages)
        if min(map(sum, links)) <= 0:
            return 0.0
        rates = self._rates(stages, links)
        visits = [self._visit(a) for stage in stages for a in stage]
        hops_s, found = self._hops_s(stages), 0.0
        for part in RINGS.in_flight:
            sessions = part * most
            shares = [
                _shares(rate, [each / sessions for each in room])
                for rate, room in zip(rates, rooms, strict=True)
            ]
            passes = min(_passes(links, shares), self._passes_shared(stages, shares))
            for visit, share in zip(visits, (x for parts in shares for x in parts), strict=True):
                visit.share, visit.step_s = share, visit.alone_s
            rate = self._rate(sessions, visits, _links_s(hops_s, shares), passes)
            if rate < found:
                break
            found = rate
        return found

    def passes(self, chain: Sequence[Assignment]) -> dict[Way, float]:
        """A token's mean passes over each shared uplink, as far as a chain's flow is not known:
        each peer of a stage then passes tokens to all of the next, as those keep up."""
        if not self._shared.bytes_per_s:
            return {}
        stages = _stages(chain)
        rates = self._rates(stages, self._link_rates(stages))
        return self._ways(stages, [[each / sum(rate) for each in rate] for rate in rates])

    def _ways(self, stages: Stages, shares: PerPeer) -> dict[Way, float]:
        parts = [
            list(zip(stage, share, strict=True))
            for stage, share in zip(stages, shares, strict=True)
        ]
        return self._shared.passes(
            (a.peer_id, b.peer_id, share * part)
            for before, after in pairwise(parts)
            for a, share in before
            for b, part in after
        )

    def _rates(self, stages: Stages, links: PerPeer) -> list[list[float]]:
        """Tokens/s that each peer and its links pass on."""
        return [
            [
                max(RINGS.rate_min, min(link, self._speeds[a.peer_id][a.end - a.start - 1]))
                for a, link in zip(stage, of_stage, strict=True)
            ]
            for stage, of_stage in zip(stages, links, strict=True)
        ]

    def _link_rates(self, stages: Stages) -> list[list[float]]:
        """Tokens/s that the links of each peer pass, from the stage before and to the next."""
        found = [[math.inf] * len(stage) for stage in stages]
        for at, (before, after) in enumerate(pairwise(stages)):
            down = [0.0] * len(after)
            for i, a in enumerate(before):
                up = 0.0
                for k, b in enumerate(after):
                    rate = self._bandwidth(a.peer_id, b.peer_id)
                    up += rate
                    down[k] += rate
                up = min(up, self._own.get(a.peer_id, NO_LIMIT)[0]) / self._token_bytes
                found[at][i] = min(found[at][i], up)
            for k, b in enumerate(after):
                own = self._own.get(b.peer_id, NO_LIMIT)[1]
                found[at + 1][k] = min(down[k], own) / self._token_bytes
        return found

    def _rate(
        self, sessions: float, visits: Sequence[_Visit], links_s: float, passes: float
    ) -> float:
        """The rate at which sessions and the time around the ring agree, in tokens/s; ``passes`` is
        what links and shared uplinks pass."""
        rows_per_token = self._load.input_tokens / self._load.output_tokens
        if passes <= 0:
            return 0.0

        waits = 1 + RINGS.wait_steps
        steps_s = sum(visit.share * visit.step_s for visit in visits)
        rate = most = min(sessions / (links_s + waits * steps_s), RINGS.fullest * passes)
        for _ in range(RINGS.turns):
            slowest_s = max(visit.at(rate, rows_per_token) for visit in visits)
            if math.isfinite(passes):
                free = 1 - min(RINGS.fullest, rate / passes)
                slowest_s = max(slowest_s, 1 / passes / (1 + rows_per_token) / free)
            steps_s = sum(visit.share * visit.step_s for visit in visits)
            ring_s = links_s + waits * steps_s + rows_per_token * slowest_s
            rate = (rate + min(most, sessions / ring_s)) / 2
        return rate

    def _visit(self, a: Assignment) -> _Visit:
        machine, layers = self._machines[a.peer_id], a.end - a.start
        run, decode = layers * machine.stretch_of(layers), self._decode[a.peer_id]
        return _Visit(
            run=run,
            decode=decode,
            prompt_row_s=run * self._prompt_row_s[a.peer_id],
            overhead_s=machine.step_overhead_s,
            alone_s=run * decode.at(1.0) + machine.step_overhead_s,
        )

    def _passes_shared(self, stages: Stages, shares: PerPeer) -> float:
        """Tokens/s that the uplinks pass which the chain's peers share."""
        if not self._shared.bytes_per_s:
            return math.inf
        return min(
            (
                self._shared.bytes_per_s[way] / self._token_bytes / each
                for way, each in self._ways(stages, shares).items()
                if each > 0
            ),
            default=math.inf,
        )

    def _sessions(self, a: Assignment) -> float:
        """Requests for whose KV a peer has room."""
        layers = self._problem.model.layers
        tokens = self._machines[a.peer_id].kv.of(a.start, a.end, layers) / (a.end - a.start)
        return (1 - ADMISSION.headroom_share) * max(0.0, tokens) / self._load.kv_tokens

    def _hops_s(self, stages: Stages) -> list[list[list[float]]]:
        """Seconds of a token from each peer of a stage to each of the next, around the ring."""
        found = []
        for at, stage in enumerate(stages):
            after = (at + 1) % len(stages)
            size = self._problem.model.activation_bytes if after else self._problem.token_bytes
            found.append(
                [[self._link_s(a.peer_id, b.peer_id, size) for b in stages[after]] for a in stage]
            )
        return found

    def _link_s(self, tail: str, head: str, size: float) -> float:
        if tail == head:
            return 0.0
        rtt = self._rtts.get((tail, head), self._problem.default_rtt_s)
        bandwidth = self._bandwidth(tail, head)
        return rtt / 2 + (size / bandwidth if bandwidth > 0 else math.inf)


def _stages(chain: Sequence[Assignment]) -> list[list[Assignment]]:
    """The peers of each span, in order."""
    by_span: dict[tuple[int, int], list[Assignment]] = {}
    for a in chain:
        by_span.setdefault((a.start, a.end), []).append(a)
    return [by_span[key] for key in sorted(by_span)]


def _shares(rates: Sequence[float], most: Sequence[float]) -> list[float]:
    """A whole shared out by the ``rates``, to each ``most`` of it; these are a whole at least."""
    found, left = list(most), 1.0
    free = list(range(len(rates)))
    while free:
        scale = left / sum(rates[at] for at in free)
        fit = [at for at in free if rates[at] * scale <= most[at]]
        if len(fit) == len(free):
            for at in free:
                found[at] = rates[at] * scale
            break
        left = max(0.0, left - sum(most[at] for at in free if rates[at] * scale > most[at]))
        free = fit
    return found


def _passes(links: PerPeer, shares: PerPeer) -> float:
    """Tokens/s that the links pass, in tokens/s each, where peers run such shares."""
    return min(
        (
            link / share
            for of_stage, parts in zip(links, shares, strict=True)
            for link, share in zip(of_stage, parts, strict=True)
            if share > 0
        ),
        default=math.inf,
    )


def _links_s(hops_s: Sequence[Sequence[Sequence[float]]], shares: PerPeer) -> float:
    """Mean time on links of one token around the ring."""
    total = 0.0
    for at, (hops, parts) in enumerate(zip(hops_s, shares, strict=True)):
        after = shares[(at + 1) % len(shares)]
        for row, share in zip(hops, parts, strict=True):
            if share > 0:
                total += share * sum(
                    part * hop for part, hop in zip(after, row, strict=True) if part > 0
                )
    return total
