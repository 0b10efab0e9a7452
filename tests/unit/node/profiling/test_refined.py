"""Real steps refine what was measured, slowly and within bounds, whatever they are."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.profiling.layer_fit import LayerFit, Line, announced
from node.profiling.refined import MOVE_MAX, REFINED, RefinedFit, RefinedTimes, StepSeen

MEASURED = LayerFit(
    (
        Line(batch=1, base_s=1e-3, token_s=1e-7),
        Line(batch=16, base_s=2e-3, token_s=1e-6),
        Line(batch=64, base_s=4e-3, token_s=4e-6),
    )
)


def steps(slower: float, count: int, rows: int = 16, context: int = 500) -> list[StepSeen]:
    seconds = 4 * slower * MEASURED.seconds(rows, context)
    step = StepSeen(decodes=True, rows=rows, context_tokens=context, layers=4, seconds=seconds)
    return [step] * count


class Serving:
    def __init__(self) -> None:
        self.times = RefinedTimes(MEASURED, None)
        self.now_s = 0.0
        self.times.take((), self.now_s)

    def minute(self, seen: list[StepSeen]) -> float:
        """The announced time of 16 rows, as a multiple of the measured one."""
        self.times.take(seen, self.now_s + REFINED.window_s / 2)
        self.now_s += REFINED.window_s
        self.times.take((), self.now_s)
        return self.times.decode_times[1][1] / announced(MEASURED)[1][1]


def test_a_machine_that_is_slower_for_long_says_so() -> None:
    peer = Serving()
    factors = [peer.minute(steps(1.5, 100)) for _ in range(40)]
    assert factors[0] == 1, "a minute changes nothing that is told"
    assert 1.5 / REFINED.told_apart / 1.01 < factors[-1] <= 1.5 * 1.01
    told = sorted(set(factors))
    assert all(b / a > REFINED.told_apart * 0.99 for a, b in itertools.pairwise(told))
    assert len(told) < 6
    for _ in range(60):
        back = peer.minute(steps(1.0, 100))
    assert back < REFINED.told_apart * 1.01


def test_outliers_few_steps_and_one_busy_minute_change_nothing() -> None:
    peer = Serving()
    for _ in range(10):
        assert peer.minute(steps(1.0, 60) + steps(1000.0, 50)) == 1
    for _ in range(10):
        assert peer.minute(steps(5.0, REFINED.steps_least - 1)) == 1
    assert peer.minute(steps(5.0, 1000)) == 1


def test_sizes_that_never_ran_follow_the_nearest_that_did() -> None:
    peer = Serving()
    for _ in range(60):
        peer.minute(steps(2.0, 100))
    times = peer.times.decode_times
    for told, measured in zip(times, announced(MEASURED), strict=True):
        for ns, measured_ns in zip(told[1:], measured[1:], strict=True):
            assert ns == pytest.approx(2 * measured_ns, rel=REFINED.told_apart - 1 + 0.02)


def test_prompts_are_refined_by_chunks_alone() -> None:
    times = RefinedTimes(MEASURED, MEASURED)
    chunk = StepSeen(decodes=False, rows=16, context_tokens=0, layers=2, seconds=2 * 2 * 2e-3)
    for minute in range(60):
        times.take([chunk] * 50, (minute + 1) * (REFINED.window_s + 1))
    assert times.decode_times == announced(MEASURED)
    assert times.prompt_times[1][1] == pytest.approx(4e6, rel=REFINED.told_apart - 1 + 0.02)
    assert RefinedTimes(MEASURED, None).prompt_times == ()


@given(
    st.lists(
        st.tuples(
            st.integers(-5, 1 << 20), st.floats(0, 1e6), st.floats(allow_nan=True) | st.floats(0, 9)
        ),
        max_size=200,
    )
)
def test_no_window_moves_a_time_by_more_than_a_step(seen) -> None:  # type: ignore[no-untyped-def]
    fit = RefinedFit(MEASURED)
    before = [0.0] * len(MEASURED.lines)
    for _ in range(3):
        for rows, context, seconds in seen:
            fit.see(rows, context, seconds)
        fit.end_window()
        moved = [abs(now - then) for now, then in zip(fit._corrections, before, strict=True)]
        assert max(moved) <= MOVE_MAX * (1 + 1e-9)
        assert all(map(math.isfinite, fit._corrections))
        before = list(fit._corrections)
        times = fit.times()
        assert all(0 < near_ns <= far_ns for _, near_ns, far_ns in times)
        assert list(times) == sorted(times)
