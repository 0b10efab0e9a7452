"""What the fit says between points, on times whose law is known."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.profiling.layer_fit import Line, Timing, fit

LINES = {1: (1e-3, 1e-7), 4: (1.2e-3, 4e-7), 16: (2e-3, 16e-7)}
CONTEXTS = (1, 512, 2048)


def true_s(batch: int, context: int) -> float:
    base_s, token_s = LINES[batch]
    return base_s + token_s * context


POINTS = [Timing(batch=b, context_tokens=c, seconds=true_s(b, c)) for b in LINES for c in CONTEXTS]


def test_a_law_of_lines_is_found() -> None:
    found = fit(reversed(POINTS))
    for line in found.lines:
        assert (line.base_s, line.token_s) == pytest.approx(LINES[line.batch], rel=1e-6)
    assert max(found.errors(POINTS)) < 1e-9
    assert found.seconds(4, 1000) == pytest.approx(true_s(4, 1000))
    between = (true_s(4, 300) + true_s(16, 300)) / 2
    assert found.seconds(10, 300) == pytest.approx(between)
    assert found.seconds(32, 300) == pytest.approx(2 * true_s(16, 300))


def test_errors_are_shares_of_what_was_measured() -> None:
    found = fit(POINTS)
    off = Timing(batch=4, context_tokens=512, seconds=true_s(4, 512) / 2)
    assert found.errors([off]) == pytest.approx([1.0])


def test_a_batch_seen_at_one_context_takes_the_slope_of_the_nearest() -> None:
    few = [t for t in POINTS if t.batch < 16 or t.context_tokens == 1]
    assert fit(few).seconds(16, 2048) == pytest.approx(true_s(16, 2048), rel=1e-3)


def test_one_point_is_a_fit() -> None:
    found = fit([Timing(batch=1, context_tokens=1, seconds=0.5)])
    assert found.lines == (Line(batch=1, base_s=0.5, token_s=0.0),)
    assert found.seconds(1, 5000) == 0.5
    assert found.seconds(3, 1) == 1.5
    with pytest.raises(ValueError, match="point"):
        fit([])


timings = st.builds(
    Timing,
    batch=st.sampled_from((1, 2, 4, 8, 16)),
    context_tokens=st.sampled_from((1, 512, 1024, 2048)),
    seconds=st.floats(1e-6, 1.0),
)


@given(st.lists(timings, min_size=1, max_size=20))
def test_whatever_was_measured_times_are_positive_and_grow_with_the_context(
    measured: list[Timing],
) -> None:
    found = fit(measured)
    for batch in (1, 3, 7, 16, 40):
        times = [found.seconds(batch, context) for context in (1, 100, 3000)]
        assert all(0 < a <= b * (1 + 1e-9) for a, b in itertools.pairwise(times))
