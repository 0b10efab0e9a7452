"""A peer that answers lives, one that does not is dead within its deadline, whatever the reason."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.policies.failure.detector import (
    Dead,
    EnginePace,
    PeerWatch,
    PingNow,
    StepTimes,
    WatchConfig,
    deadline_s,
)

CONFIG = WatchConfig()
END_S = 60.0


@given(st.none() | st.floats(0, 1e9) | st.just(math.nan) | st.just(math.inf))
def test_a_deadline_is_between_two_and_five_seconds(p95_s: float | None) -> None:
    limit_s = deadline_s(p95_s, CONFIG)
    assert 2.0 <= limit_s <= 5.0
    if p95_s is not None and 0.4 <= p95_s <= 1.0:
        assert limit_s == pytest.approx(5 * p95_s)


@given(st.lists(st.floats(0, 100), max_size=200))
def test_the_95th_percentile_is_of_the_last_64(samples: list[float]) -> None:
    times = StepTimes()
    for sample in samples:
        times.add(sample)
    last = sorted(samples[-64:])
    if len(last) < 8:
        assert times.p95_s is None
    else:
        assert times.p95_s is not None
        assert times.p95_s in last
        below = sum(sample <= times.p95_s for sample in last)
        assert below >= 0.95 * len(last)
        assert sum(sample < times.p95_s for sample in last) < 0.95 * len(last)


class Run:
    """A watch whose peer answers pings after ``delay_s`` until it falls silent."""

    def __init__(self, *, silent_s: float = math.inf, delay_s: float = 0.05) -> None:
        self.watch = PeerWatch(config=CONFIG, heard_s=0.0)
        self.silent_s = silent_s
        self.delay_s = delay_s
        self.pace = EnginePace()
        self.now_s = 0.0
        self.pongs: list[tuple[float, int]] = []

    def until_dead(self, *, late_s: float = 0.0) -> tuple[float, str] | None:
        """When the watch gave the peer up and why; None if it did not by the end."""
        while self.now_s < END_S:
            self.pongs.sort()
            if self.pongs and self.pongs[0][0] <= self.watch.wake_at_s:
                self.now_s, nonce = self.pongs.pop(0)
                p95_s = self.pace.p95_s
                self.watch.answered(nonce, self.pace.stalled_s(self.now_s), p95_s, self.now_s)
                continue
            self.now_s = max(self.now_s, self.watch.wake_at_s) + late_s
            match self.watch.tick(self.now_s):
                case Dead(reason=reason):
                    return self.now_s, reason
                case PingNow(nonce=nonce) if self.now_s + self.delay_s / 2 < self.silent_s:
                    self.pongs.append((self.now_s + self.delay_s, nonce))
        return None


@given(silent_s=st.floats(0, 40), delay_s=st.floats(0, 0.9))
def test_a_silent_peer_is_dead_within_five_seconds_and_not_before_two(
    silent_s: float, delay_s: float
) -> None:
    """Whether it was killed, stopped or cut off: from outside they are the same."""
    dead = Run(silent_s=silent_s, delay_s=delay_s).until_dead()
    assert dead is not None
    at_s, reason = dead
    assert "silent" in reason
    assert at_s <= silent_s + delay_s + 5.0 + 1e-6
    assert at_s >= min(silent_s, 2.0)
    if silent_s > 10:
        assert at_s >= silent_s - CONFIG.ping_every_s - delay_s + 2.0 - 1e-6


@given(delay_s=st.floats(0, 1.4))
def test_a_peer_that_answers_lives(delay_s: float) -> None:
    assert Run(delay_s=delay_s).until_dead() is None


@given(step_s=st.floats(0.001, 0.9), stuck_at_s=st.floats(5, 20))
def test_an_engine_that_is_stuck_is_as_good_as_dead_although_it_answers(
    step_s: float, stuck_at_s: float
) -> None:
    run = Run()
    for _ in range(20):
        run.pace.steps.add(step_s)
    run.now_s = stuck_at_s
    run.watch.unused(stuck_at_s)
    run.pace.submitted("s", stuck_at_s)
    dead = run.until_dead()
    assert dead is not None
    at_s, reason = dead
    assert "too slow" in reason
    limit_s = deadline_s(step_s, CONFIG)
    assert stuck_at_s + limit_s - 1e-6 <= at_s <= stuck_at_s + 5.0 + CONFIG.ping_every_s


@pytest.mark.parametrize(("chunk_s", "dead_s"), [(None, 5.0), (0.1, 2.0), (0.8, 4.0), (3.0, 5.0)])
def test_a_chunk_of_a_prompt_has_the_time_of_other_chunks_not_of_decodes(
    chunk_s: float | None, dead_s: float
) -> None:
    run = Run()
    for _ in range(20):
        run.pace.finished(["s"], 0.0)  # decodes, which take no time at all
    if chunk_s is not None:
        for number in range(20):
            run.pace.submitted("s", number * chunk_s, decodes=False)
            assert run.pace.finished(["s"], (number + 1) * chunk_s, decodes=False) == (
                pytest.approx(chunk_s)
            )
    run.pace.submitted("s", 0.0)
    assert run.pace.p95_s == run.pace.steps.p95_s, "nobody waits for a chunk"
    run.pace.dropped("s")
    run.pace.submitted("s", 0.0, decodes=False)
    dead = run.until_dead()
    assert dead is not None
    assert dead_s - 1e-6 <= dead[0] <= dead_s + CONFIG.ping_every_s


def test_an_engine_with_much_to_do_that_gets_on_is_not_stuck() -> None:
    """Queues grow under overload; only a step that does not end counts."""
    run = Run()
    for item in range(1000):
        run.pace.submitted(f"s{item}", 0.0)
    for step in range(200):
        run.now_s = step * 0.3
        run.pace.finished([f"s{step}"], run.now_s)
        assert run.pace.stalled_s(run.now_s + 0.29) == pytest.approx(0.29)


def test_what_an_ended_session_had_queued_does_not_count() -> None:
    pace = EnginePace()
    pace.submitted("a", 1.0)
    pace.submitted("a", 1.0)
    assert pace.stalled_s(3.0) == 2.0
    pace.dropped("a")
    assert pace.stalled_s(3.0) == 0.0
    pace.finished(["a"], 4.0)  # its step was running already
    assert pace.stalled_s(5.0) == 0.0


def test_a_process_that_was_stopped_itself_blames_nobody() -> None:
    run = Run()
    assert isinstance(run.watch.tick(0.0), PingNow)
    assert not isinstance(run.watch.tick(100.0), Dead)
    assert not isinstance(run.watch.tick(100.5), Dead)
    dead = Run(silent_s=0.0).until_dead(late_s=0.2)
    assert dead is not None
    assert dead[0] < 6.0, "a tick that is a little late is no excuse"


def test_an_unused_stream_is_not_pinged_and_silence_counts_from_its_next_use() -> None:
    watch = PeerWatch(config=CONFIG, heard_s=0.0)
    watch.unused(50.0)
    assert watch.tick(50.4) is None
    assert isinstance(watch.tick(50.5), PingNow)
    assert not isinstance(watch.tick(51.0), Dead)


@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.floats(0, 1e10), st.none() | st.floats(0, 1e10)),
        max_size=30,
    )
)
def test_whatever_a_peer_claims_its_silence_is_noticed(
    claims: list[tuple[int, float, float | None]],
) -> None:
    run = Run(silent_s=0.0)
    for nonce, stalled_s, p95_s in claims:
        run.watch.answered(nonce, stalled_s, p95_s, 0.0)
    dead = run.until_dead()
    assert dead is not None
    assert dead[0] <= 5.0 + 1e-6
