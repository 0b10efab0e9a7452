"""Laws of the scheduler over arbitrary arrivals."""

from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.policies.batching.scheduler import BATCHING, BatchLimits, Scheduler, limits_of


@dataclass(frozen=True)
class Work:
    session: str
    tokens: int
    number: int
    background: bool = False
    urgent: bool = False
    drafts: int = 0
    ring_s: None = None

    @property
    def decodes(self) -> bool:
        return self.tokens == 1 + self.drafts


arrivals = st.lists(st.tuples(st.sampled_from("abcde"), st.integers(1, 12)), max_size=40)
limits = st.builds(
    BatchLimits, decodes_max=st.integers(1, 4), prefill_tokens_max=st.integers(1, 16)
)


def works(drawn: list[tuple[str, int]]) -> list[Work]:
    return [
        Work(key, tokens, number, urgent=key in "ab") for number, (key, tokens) in enumerate(drawn)
    ]


@given(arrivals, limits, st.integers(1, 7))
def test_nothing_is_lost_and_sessions_keep_their_order(
    drawn: list[tuple[str, int]], limits: BatchLimits, burst: int
) -> None:
    scheduler = Scheduler(limits)
    waiting, done = works(drawn), []
    while waiting or len(scheduler):
        for work in waiting[:burst]:
            scheduler.add(work)
        waiting = waiting[burst:]
        before = len(scheduler)
        batch = scheduler.next_batch(0.0)
        assert bool(batch) == bool(before)
        assert len(scheduler) == before - len(batch)
        assert len({work.session for work in batch}) == len(batch)
        assert sum(work.tokens == 1 for work in batch) <= limits.decodes_max
        prefills = [work.tokens for work in batch if work.tokens > 1]
        assert len(prefills) <= 1 or sum(prefills) <= limits.prefill_tokens_max
        done += batch
    assert sorted(work.number for work in done) == list(range(len(drawn)))
    for key in "abcde":
        numbers = [work.number for work in done if work.session == key]
        assert numbers == sorted(numbers)
    assert scheduler.next_batch(0.0) == []


@given(limits, st.integers(2, 40), st.integers(0, 8))
def test_a_prefill_runs_at_once_however_many_decodes_wait(
    limits: BatchLimits, tokens: int, decodes: int
) -> None:
    scheduler = Scheduler(limits)
    for number in range(decodes):
        scheduler.add(Work(f"decode-{number}", 1, number))
    scheduler.add(Work("prefill", tokens, decodes))
    assert any(work.session == "prefill" for work in scheduler.next_batch(0.0))


@given(limits, st.integers(1, 8))
def test_decodes_wait_for_no_prefill_and_not_for_ever(limits: BatchLimits, decodes: int) -> None:
    scheduler = Scheduler(limits)
    for number in range(20):
        scheduler.add(Work(f"prefill-{number}", 9, number))
    for number in range(decodes):
        scheduler.add(Work(f"decode-{number}", 1, number))
    steps = -(-decodes // limits.decodes_max)
    ran = [work.session for _ in range(steps) for work in scheduler.next_batch(0.0)]
    assert sum(key.startswith("decode") for key in ran) == decodes


@given(limits, st.integers(2, 40))
def test_a_large_prefill_is_not_overtaken_for_ever(limits: BatchLimits, tokens: int) -> None:
    scheduler = Scheduler(limits)
    scheduler.add(Work("first", 2, 0))
    scheduler.add(Work("large", tokens, 1))
    ran: list[str] = []
    for number in range(2):
        scheduler.add(Work(f"small-{number}", 2, number + 2))
        ran += [work.session for work in scheduler.next_batch(0.0)]
    assert "large" in ran


@given(limits, st.sampled_from([1, 17]), st.integers(1, 8))
def test_urgent_work_runs_before_what_came_a_little_earlier(
    limits: BatchLimits, tokens: int, others: int
) -> None:
    scheduler = Scheduler(limits)
    for number in range(others):
        scheduler.add(Work(f"ordinary-{number}", tokens, number))
    scheduler.add(Work("urgent", tokens, others, urgent=True))
    assert scheduler.next_batch(0.0)[0].session == "urgent"


@given(limits, st.lists(st.integers(1, 20), min_size=2, max_size=8), st.data())
def test_urgent_work_without_end_leaves_a_share_of_the_steps(
    limits: BatchLimits, tokens: list[int], data: st.DataObject
) -> None:
    """All sessions come back at once: each gets a third of the turns of an order by arrival."""
    flags = data.draw(st.lists(st.booleans(), min_size=len(tokens), max_size=len(tokens)))
    steps = 120

    def turns(flags: list[bool]) -> Counter[str]:
        scheduler, ran = Scheduler(limits), Counter[str]()
        for number, (rows, urgent) in enumerate(zip(tokens, flags, strict=True)):
            scheduler.add(Work(str(number), rows, number, urgent=urgent))
        for _ in range(steps):
            for work in scheduler.next_batch(0.0):
                ran[work.session] += 1
                scheduler.add(work)
        return ran

    ran, fair = turns(flags), turns([False] * len(flags))
    for session in fair:
        assert ran[session] >= fair[session] // (BATCHING.urgent_steps + 1) - 1


@given(arrivals, limits)
def test_dropped_work_never_runs(drawn: list[tuple[str, int]], limits: BatchLimits) -> None:
    scheduler = Scheduler(limits)
    for work in works(drawn):
        scheduler.add(work)
    scheduler.drop("a")
    scheduler.drop("a")
    assert len(scheduler) == sum(session != "a" for session, _ in drawn)
    while batch := scheduler.next_batch(0.0):
        assert all(work.session != "a" for work in batch)


@given(limits, st.lists(st.integers(2, 16), max_size=12), st.integers(1, 12))
def test_a_decode_waits_for_bounded_work(
    limits: BatchLimits, prefills: list[int], decodes: int
) -> None:
    """Between two tokens of a session: one turn of all decodes, each with one share of prefill."""
    scheduler = Scheduler(limits)
    for number, tokens in enumerate(prefills):
        scheduler.add(Work(f"prefill-{number}", tokens, number))
    for number in range(decodes):
        scheduler.add(Work(f"decode-{number}", 1, 100 + number))
    most = limits.decodes_max + max(limits.prefill_tokens_max, max(prefills, default=0))
    turns = -(-decodes // limits.decodes_max)
    waiting: dict[str, int] = {f"decode-{number}": 0 for number in range(decodes)}
    for turn in range(4 * turns):
        batch = scheduler.next_batch(0.0)
        assert sum(work.tokens for work in batch) <= most
        for work in batch:
            if work.tokens == 1:
                assert turn - waiting[work.session] <= turns
                waiting[work.session] = turn
                scheduler.add(work)  # its next token


@pytest.mark.parametrize("decode_ms", [1.0, 20.0, 400.0])
def test_the_share_of_prefill_is_what_fits_under_the_bound(decode_ms: float) -> None:
    seconds = {1: 0.001, 16: 0.002, 64: 0.005, 256: 0.020, 512: 0.040}
    chosen = limits_of(seconds, 8, decode_ms / 1e3)
    assert chosen.prefill_tokens_max == {1.0: 16, 20.0: 24, 400.0: 512}[decode_ms]


@given(
    st.dictionaries(st.integers(1, 600), st.floats(1e-6, 1.0), min_size=1, max_size=6),
    st.integers(1, 80),
    st.floats(1e-3, 1.0),
)
def test_any_measurement_gives_usable_limits(
    seconds: dict[int, float], layers: int, bound_s: float
) -> None:
    chosen = limits_of(seconds, layers, bound_s)
    assert (
        BATCHING.prefill_tokens_least <= chosen.prefill_tokens_max <= BATCHING.prefill_tokens_most
    )


def test_background_work_rides_along_and_runs_alone_only_when_it_is_quiet() -> None:
    scheduler = Scheduler(BatchLimits())
    for number in range(4):
        scheduler.add(Work("moves", 8, number, background=True))
    scheduler.add(Work("other", 8, 4, background=True))
    scheduler.add(Work("decodes", 1, 5))
    assert [w.session for w in scheduler.next_batch(1.0)] == ["decodes", "moves"]
    assert scheduler.next_batch(1.0 + BATCHING.background_quiet_s / 2) == []
    assert scheduler.wait_s(1.0 + BATCHING.background_quiet_s / 2) == pytest.approx(
        BATCHING.background_quiet_s / 2
    )
    quiet_s = 1.0 + BATCHING.background_quiet_s
    assert [w.number for w in scheduler.next_batch(quiet_s)] == [1]
    assert [w.number for w in scheduler.next_batch(quiet_s)] == [2]
    scheduler.add(Work("decodes", 1, 6))
    assert [w.number for w in scheduler.next_batch(quiet_s)] == [6, 3]
    assert [w.session for w in scheduler.next_batch(quiet_s + 1.0)] == ["other"]
    assert scheduler.wait_s(quiet_s) is None


@given(st.lists(st.integers(0, 15), min_size=1, max_size=20), st.integers(1, 40))
def test_drafted_rows_count_as_decodes_and_are_bounded(drafts: list[int], most: int) -> None:
    scheduler = Scheduler(BatchLimits(decodes_max=most, prefill_tokens_max=1))
    for number, each in enumerate(drafts):
        scheduler.add(Work(f"s{number}", 1 + each, number, drafts=each))
    assert scheduler.backlog_tokens == 0
    ran: list[Work] = []
    while batch := scheduler.next_batch(0.0):
        assert len(batch) == 1 or sum(work.tokens for work in batch) <= most
        ran += batch
    assert [work.number for work in ran] == list(range(len(drafts)))
