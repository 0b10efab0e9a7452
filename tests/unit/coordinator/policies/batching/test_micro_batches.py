"""How many decodes a step takes, from its steps and its sessions' turns."""

import heapq
import itertools
import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from coordinator.policies.batching.micro_batches import MicroBatches, row_share_of
from coordinator.policies.batching.scheduler import BatchLimits, Scheduler


@dataclass
class Token:
    """A decode on its way round; at the last stage with what it took so far."""

    session: int
    ring_s: tuple[float, float] | None = None
    computed_s: float = 0.0
    waited_s: float = 0.0
    queued_s: float = 0.0
    tokens: int = 1
    decodes: bool = True
    background: bool = False
    urgent: bool = False


BEFORE = -1
"""Where a session comes from that begins: before the first stage."""


class Ring:
    """Stages that run the scheduler; what leaves a step arrives at once."""

    def __init__(self, fixed_s: Sequence[float], row_s: float, *, split: bool) -> None:
        self.fixed_s, self.row_s = fixed_s, row_s
        self.stages = [
            Scheduler[Token](BatchLimits(row_share=row_s / each if split else 0.0))
            for each in fixed_s
        ]
        self.busy = [False] * len(fixed_s)
        self.events: list[tuple[float, int, int, list[Token]]] = []
        self.numbers = itertools.count()
        self.last = len(fixed_s) - 1

    def arrive(self, at: int, tokens: list[Token], now_s: float) -> None:
        for token in tokens:
            token.queued_s = now_s
            if at == 0:
                token.computed_s = token.waited_s = 0.0
            of_ring = (token.computed_s, token.waited_s)
            token.ring_s = of_ring if at == self.last > 0 else None
            self.stages[at].add(token)

    def begin(self, at: int, now_s: float) -> None:
        batch = self.stages[at].next_batch(now_s)
        self.busy[at] = bool(batch)
        if not batch:
            return
        took_s = self.fixed_s[at] + self.row_s * len(batch)
        for token in batch:
            token.waited_s += now_s - token.queued_s
            token.computed_s += took_s
        heapq.heappush(self.events, (now_s + took_s, next(self.numbers), at, batch))

    def opens(self, token: Token, at_s: float) -> None:
        heapq.heappush(self.events, (at_s, next(self.numbers), BEFORE, [token]))

    def tokens(self, until_s: float) -> int:
        """Tokens that come until then."""
        done = 0
        while self.events[0][0] < until_s:
            now_s, _, at, batch = heapq.heappop(self.events)
            after = 0 if at == self.last else at + 1
            done += len(batch) if at == self.last else 0
            self.arrive(after, batch, now_s)
            if at != BEFORE:
                self.begin(at, now_s)
            if not self.busy[after]:
                self.begin(after, now_s)
        return done


def tokens_per_s(
    fixed_s: Sequence[float],
    row_s: float,
    sessions: int,
    *,
    split: bool,
    together: bool = True,
    until_s: float = 60.0,
) -> float:
    """Sessions begin together or one by one; the first half of the time is not counted."""
    ring, draw = Ring(fixed_s, row_s, split=split), random.Random(1)
    for session in range(sessions):
        ring.opens(Token(session), 0.0 if together else draw.random())
    ring.tokens(until_s / 2)
    return ring.tokens(until_s) / (until_s / 2)


def test_the_stages_of_a_long_ring_work_at_the_same_time() -> None:
    """Without it, all sessions become one batch, and a stage works a tenth of the time."""
    ring, row_s, sessions = [5e-3] * 10, 1e-4, 34
    merged = tokens_per_s(ring, row_s, sessions, split=False)
    assert merged == pytest.approx(sessions / (10 * (5e-3 + sessions * row_s)), rel=0.05)
    assert tokens_per_s(ring, row_s, sessions, split=True) > 1.3 * merged


@pytest.mark.parametrize("row_s", [0.0, 1e-6])
def test_one_batch_goes_round_where_rows_cost_nothing(row_s: float) -> None:
    merged = tokens_per_s([5e-3] * 6, row_s, 32, split=False)
    assert tokens_per_s([5e-3] * 6, row_s, 32, split=True) > 0.99 * merged


@pytest.mark.parametrize("slow", [0, 1, 2])
def test_a_ring_with_a_stage_that_is_always_at_work_loses_little(slow: int) -> None:
    ring = [2e-3] * 3
    ring[slow] = 50e-3
    merged = tokens_per_s(ring, 5e-4, 100, split=False)
    assert tokens_per_s(ring, 5e-4, 100, split=True) > 0.97 * merged


def test_rings_of_all_sorts_lose_nothing_by_it() -> None:
    draw, gains = random.Random(5), []
    for _ in range(60):
        ring = [draw.uniform(1e-3, 2e-2) for _ in range(draw.randint(1, 8))]
        row_s, sessions = draw.uniform(0, 0.1) * min(ring), draw.randint(1, 60)
        whole, cut = (
            tokens_per_s(ring, row_s, sessions, split=split, together=False, until_s=20.0)
            for split in (False, True)
        )
        gains.append(cut / whole)
    assert min(gains) > 0.7
    assert statistics.geometric_mean(gains) > 0.98


def turns(
    batches: MicroBatches, waited_share: float, count: int, sessions: int = 40, since: int = 0
) -> float:
    """The limit after turns of 0.2 s with a step of 4 ms each."""
    most = math.inf
    for turn in range(since, since + count):
        now_s = 0.2 * turn
        tokens = [Token(n, ring_s=(1 - waited_share, waited_share)) for n in range(sessions)]
        batches.sessions_max(now_s)
        batches.begins(tokens, now_s)
        most = batches.sessions_max(now_s + 0.004)
    return most


def test_a_stage_knows_nothing_before_its_sessions_come_back() -> None:
    assert turns(MicroBatches(0.05), 0.0, 1) == math.inf


def test_there_are_more_micro_batches_while_nobody_waits_and_at_most_the_best() -> None:
    few, many = turns(MicroBatches(0.05), 0.0, 6), turns(MicroBatches(0.05), 0.0, 200)
    assert 40 > few > many
    assert many == math.ceil(40 / math.sqrt(2 * 0.05 * 40 * 0.2 / 0.004))


def test_there_is_one_where_tokens_wait_at_other_stages() -> None:
    batches = MicroBatches(0.05)
    assert turns(batches, 0.0, 50) < 40
    assert turns(batches, 0.6, 50, since=50) == math.inf


def test_a_stage_before_the_last_cuts_nothing() -> None:
    batches = MicroBatches(0.05)
    for turn in range(50):
        batches.sessions_max(0.2 * turn)
        batches.begins([Token(n) for n in range(40)], 0.2 * turn)
        assert batches.sessions_max(0.2 * turn + 0.01) == math.inf


def test_sessions_that_ended_count_no_more() -> None:
    batches = MicroBatches(1.0)
    assert turns(batches, 0.0, 50) < 20
    for session in range(4, 40):
        batches.drop(session)
    assert batches.sessions_max(10.0) <= 4


def test_the_cost_of_a_row_is_told_from_the_fewest_and_the_most_rows() -> None:
    assert row_share_of({1: 1.1e-3, 16: 9.0, 64: 7.4e-3, 256: 99.0}) == pytest.approx(0.1)
    assert row_share_of({0: 0.0, 1: 2e-3, 64: 1e-3}) == 0.0, "no step gets shorter with rows"
    assert row_share_of({1: 1e-3, 2: 2e-3}) == math.inf, "rows are all that it costs"
    assert row_share_of({}) == row_share_of({4: 1.0}) == row_share_of({1: 1.0, 512: 9.0}) == 0.0


def test_what_is_claimed_of_one_session_counts_as_one_session() -> None:
    """A stage that says that its rows waited for minutes does not join all others' batches."""
    honest, claimed = MicroBatches(0.05), MicroBatches(0.05)
    for turn in range(100):
        for batches, waited_s in ((honest, 0.0), (claimed, 600.0)):
            tokens = [Token(n, ring_s=(0.1, waited_s if n == 0 else 0.0)) for n in range(40)]
            batches.sessions_max(0.2 * turn)
            batches.begins(tokens, 0.2 * turn)
            batches.sessions_max(0.2 * turn + 0.004)
    assert claimed.sessions_max(20.0) == honest.sessions_max(20.0) < 40
