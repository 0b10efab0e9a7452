"""What a chain would serve, about, in a hundredth of the estimate's time. Pure.

By Little's law a chain serves as many sessions as its stages have KV for, one token each in the
time of a token around the ring. That time follows from the stages' steps at the batch that the rate
brings, and the links' delays; queues on links and the shape of frames are left to the estimate.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

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


@dataclass(frozen=True, slots=True, kw_only=True)
class RingConfig:
    """The constants of the fixed point of rate and batch."""

    turns: int = 4
    """Turns of the fixed point; each goes half of the way, which is near enough for a guess."""
    wait_steps: float = 0.5
    """Mean wait for a step that is under way, in steps."""
    fullest: float = 0.95
    """Maximum share of a peer's, or a link's, time that is taken to be used."""


RINGS = RingConfig()


@dataclass(slots=True)
class _Visit:
    """A peer's part in the ring; times are in seconds."""

    share: float
    """Share of the stage's tokens that this peer runs."""
    run: float
    """Layers that it runs, times the stretch."""
    decode: Curve
    prompt_row_s: float
    """Time of a prompt's row, for all its layers."""
    overhead_s: float
    step_s: float

    def at(self, rate: float, rows_per_token: float, fullest: float) -> float:
        """Find the step's time at ``rate`` tokens/s around the ring; returns the time that a row of
        a prompt takes then."""
        tokens = rate * self.share
        plain_s = self.run * self.decode.at(max(1.0, tokens * self.step_s)) + self.overhead_s
        free = 1 - min(fullest, tokens * rows_per_token * self.prompt_row_s)
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
        self._rtts = round_trips_s(problem)
        self._bandwidth = bandwidth_bytes_per_s(problem)
        self._own = own_rates_bytes_per_s(problem)
        self._shared = shared_uplinks(problem)

    def __call__(self, chain: Sequence[Assignment]) -> float:
        """Tokens/s of a chain whose spans are equal or follow each other; 0: no room for KV,
        or a connection that carries nothing."""
        stages, rooms, sums = self._rooms(chain)
        sessions = min(*sums, self._load.requests_max)
        if sessions <= 0:
            return 0.0
        shares = [[each / total for each in room] for room, total in zip(rooms, sums, strict=True)]
        visits = [
            self._visit(a, share)
            for stage, parts in zip(stages, shares, strict=True)
            for a, share in zip(stage, parts, strict=True)
        ]
        widest = min(self._widest(stages), self._widest_shared(stages, shares))
        return self._rate(sessions, visits, self._links_s(stages, shares), widest)

    def passes(self, chain: Sequence[Assignment]) -> dict[Way, float]:
        """A token's mean passes over each shared uplink, as far as a chain's flow is not known:
        each peer of a stage then passes tokens to all of the next, as those have room."""
        if not self._shared.bytes_per_s:
            return {}
        stages, rooms, sums = self._rooms(chain)
        shares = [
            [each / total if total > 0 else 0.0 for each in room]
            for room, total in zip(rooms, sums, strict=True)
        ]
        return self._passes(stages, shares)

    def _passes(self, stages: Stages, shares: Sequence[Sequence[float]]) -> dict[Way, float]:
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

    def _rooms(
        self, chain: Sequence[Assignment]
    ) -> tuple[list[list[Assignment]], list[list[float]], list[float]]:
        """A chain's stages, the sessions for which each of their peers has room, and the sums."""
        by_span: dict[tuple[int, int], list[Assignment]] = {}
        for a in chain:
            by_span.setdefault((a.start, a.end), []).append(a)
        stages = [by_span[key] for key in sorted(by_span)]
        rooms = [[self._sessions(a) for a in stage] for stage in stages]
        return stages, rooms, [sum(room) for room in rooms]

    def _rate(
        self, sessions: float, visits: Sequence[_Visit], links_s: float, widest: float
    ) -> float:
        """The rate at which sessions and the time around the ring agree, in tokens/s; ``widest`` is
        the number of rows per second that the narrowest joint of two stages passes."""
        rows_per_token = self._load.input_tokens / self._load.output_tokens
        passes = widest / (1 + rows_per_token)  # tokens/s, with the rows of their prompts
        if passes <= 0:
            return 0.0

        def ring_s() -> float:
            waits = 1 + RINGS.wait_steps
            return links_s + sum(visit.share * visit.step_s * waits for visit in visits)

        rate = most = min(sessions / ring_s(), RINGS.fullest * passes)
        for _ in range(RINGS.turns):
            slowest_s = max(v.at(rate, rows_per_token, RINGS.fullest) for v in visits)
            if math.isfinite(widest):
                free = 1 - min(RINGS.fullest, rate / passes)
                slowest_s = max(slowest_s, 1 / widest) / free
            rate = (rate + min(most, sessions / (ring_s() + rows_per_token * slowest_s))) / 2
        return rate

    def _visit(self, a: Assignment, share: float) -> _Visit:
        machine, layers = self._machines[a.peer_id], a.end - a.start
        run, decode = layers * machine.stretch_of(layers), self._decode[a.peer_id]
        return _Visit(
            share=share,
            run=run,
            decode=decode,
            prompt_row_s=run * self._prompt_row_s[a.peer_id],
            overhead_s=machine.step_overhead_s,
            step_s=run * decode.at(1.0) + machine.step_overhead_s,
        )

    def _widest(self, stages: Stages) -> float:
        """Rows per second that the narrowest joint of two stages passes on; ``inf``: one stage."""
        size = max(1, self._problem.model.activation_bytes)
        narrowest = math.inf
        for before, after in pairwise(stages):
            up = sum(
                min(
                    max(self._bandwidth(a.peer_id, b.peer_id) for b in after),
                    self._own.get(a.peer_id, NO_LIMIT)[0],
                )
                for a in before
            )
            down = sum(
                min(
                    max(self._bandwidth(a.peer_id, b.peer_id) for a in before),
                    self._own.get(b.peer_id, NO_LIMIT)[1],
                )
                for b in after
            )
            narrowest = min(narrowest, up / size, down / size)
        return narrowest

    def _widest_shared(self, stages: Stages, shares: Sequence[Sequence[float]]) -> float:
        """The same of the uplinks that the chain's peers share."""
        if not self._shared.bytes_per_s:
            return math.inf
        size = max(1, self._problem.model.activation_bytes)
        return min(
            (
                self._shared.bytes_per_s[way] / size / each
                for way, each in self._passes(stages, shares).items()
                if each > 0
            ),
            default=math.inf,
        )

    def _sessions(self, a: Assignment) -> float:
        """Requests for whose KV a peer has room."""
        layers = self._problem.model.layers
        tokens = self._machines[a.peer_id].kv.of(a.start, a.end, layers) / (a.end - a.start)
        return (1 - ADMISSION.headroom_share) * max(0.0, tokens) / self._load.kv_tokens

    def _links_s(self, stages: Stages, shares: Sequence[Sequence[float]]) -> float:
        """Mean time on links of one token around the ring."""
        total = 0.0
        for at, stage in enumerate(stages):
            after = (at + 1) % len(stages)
            size = self._problem.model.activation_bytes if after else self._problem.token_bytes
            for a, share in zip(stage, shares[at], strict=True):
                for b, part in zip(stages[after], shares[after], strict=True):
                    if a.peer_id != b.peer_id:
                        total += share * part * self._link_s(a.peer_id, b.peer_id, size)
        return total

    def _link_s(self, tail: str, head: str, size: float) -> float:
        rtt = self._rtts.get((tail, head), self._problem.default_rtt_s)
        bandwidth = self._bandwidth(tail, head)
        return rtt / 2 + (size / bandwidth if bandwidth > 0 else math.inf)
