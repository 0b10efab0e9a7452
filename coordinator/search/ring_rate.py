"""What a chain would serve, about, in a hundredth of the estimate's time. Pure.

By Little's law a chain serves as many sessions as its stages have KV for, one token each in the time
of a round of the ring. That time follows from the stages' steps at the batch that the rate brings,
and the links' delays; queues on links and the shape of frames are left to the estimate.
"""

import math
from itertools import pairwise

from coordinator.admission.rules import HEADROOM_SHARE
from coordinator.batching.scheduler import LIMIT_ROWS
from coordinator.evaluation.max_flow import (
    bandwidth_bytes_per_s,
    own_rates_bytes_per_s,
    round_trips_s,
)
from coordinator.problem.service import Curve, Service
from dht.messages.types import Assignment, Problem

NO_LIMIT = (math.inf, math.inf)
ROUNDS = 4
"""Rounds of the fixed point of rate and batch."""
WAIT = 0.5
"""Mean wait for a step that is under way, in steps."""
FULLEST = 0.95
"""Share of a peer's time that may go to prompts and decodes."""


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

    def __call__(self, chain: tuple[Assignment, ...]) -> float:
        """Tokens/s of a chain whose spans are equal or follow each other."""
        stages: dict[tuple[int, int], list[Assignment]] = {}
        for a in chain:
            stages.setdefault((a.start, a.end), []).append(a)
        ordered = [stages[key] for key in sorted(stages)]
        rooms = [[self._sessions(a) for a in stage] for stage in ordered]
        sums = [sum(room) for room in rooms]
        sessions = min(min(sums), self._load.requests_max)
        if sessions <= 0:
            return 0.0
        shares = [[each / total for each in room] for room, total in zip(rooms, sums, strict=True)]
        links_s = self._links_s(ordered, shares)
        work = [
            (share, *self._work(a))
            for stage, parts in zip(ordered, shares, strict=True)
            for a, share in zip(stage, parts, strict=True)
        ]
        per_token = self._load.input_tokens / self._load.output_tokens
        widths = self._widths(ordered)
        wide = min(widths, default=math.inf) / (1 + per_token)  # tokens/s, with their prompts
        steps = [run * decode.at(1.0) + overhead for _, run, decode, _, overhead in work]
        alone_s = links_s + sum(
            share * step * (1 + WAIT) for (share, *_), step in zip(work, steps, strict=True)
        )
        rate = most = min(sessions / alone_s, FULLEST * wide)
        for _ in range(ROUNDS):
            ring_s, slowest_s = links_s, 0.0
            for n, (share, run, decode, prompt_s, overhead_s) in enumerate(work):
                tokens = rate * share
                plain = run * decode.at(max(1.0, tokens * steps[n])) + overhead_s
                free = 1 - min(FULLEST, tokens * per_token * run * prompt_s)
                steps[n] = plain / free
                ring_s += share * steps[n] * (1 + WAIT)
                slowest_s = max(slowest_s, run * prompt_s / free)
            free = 1 - min(FULLEST, rate / wide)
            slowest_s = max(slowest_s, *(1 / width for width in widths)) / free if widths else slowest_s
            rate = (rate + min(most, sessions / (ring_s + per_token * slowest_s))) / 2
        return rate

    def _widths(self, stages: list[list[Assignment]]) -> list[float]:
        """Rows per second that pass from each stage to the next."""
        size = max(1, self._problem.model.activation_bytes)
        found = []
        for before, after in pairwise(stages):
            best = [max(self._bandwidth(a.peer_id, b.peer_id) for b in after) for a in before]
            up = sum(min(w, self._own.get(a.peer_id, NO_LIMIT)[0]) for a, w in zip(before, best, strict=True))
            best = [max(self._bandwidth(a.peer_id, b.peer_id) for a in before) for b in after]
            down = sum(min(w, self._own.get(b.peer_id, NO_LIMIT)[1]) for b, w in zip(after, best, strict=True))
            found.append(min(up, down) / size)
        return found

    def _sessions(self, a: Assignment) -> float:
        """Requests for whose KV a peer has room."""
        layers = self._problem.model.layers
        tokens = self._machines[a.peer_id].kv.of(a.start, a.end, layers) / (a.end - a.start)
        return (1 - HEADROOM_SHARE) * max(0.0, tokens) / self._load.kv_tokens

    def _work(self, a: Assignment) -> tuple[float, Curve, float, float]:
        machine, layers = self._machines[a.peer_id], a.end - a.start
        run = layers * machine.stretch_of(layers)
        return run, self._decode[a.peer_id], self._prompt_row_s[a.peer_id], machine.step_overhead_s

    def _links_s(self, stages: list[list[Assignment]], shares: list[list[float]]) -> float:
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
        return rtt / 2 + size / self._bandwidth(tail, head)
