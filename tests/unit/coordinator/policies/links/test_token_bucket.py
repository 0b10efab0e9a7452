"""The owner's rate is kept whatever the traffic, decodes wait last, and months begin anew."""

import math
from datetime import UTC, datetime

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from coordinator.policies.links.token_bucket import BUCKET, Allowance, MonthlyUse

RATE = 1e6


@given(
    st.lists(st.tuples(st.integers(1, 20_000), st.booleans(), st.integers(0, 50_000)), max_size=200)
)
@example(  # found: a level that was raised by every look was asked for one microsecond more
    [(1, False, 0), (1895, False, 0), *[(20_000, False, 0)] * 3, (1, False, 3732)]
)
def test_whoever_waits_as_told_keeps_the_rate(sends: list[tuple[int, bool, int]]) -> None:
    allowance = Allowance(RATE)
    now_us, spent = 0, 0
    for size, urgent, pause_us in sends:
        now_us += pause_us
        now_us += allowance.wait_us(now_us, urgent=urgent)
        assert allowance.wait_us(now_us, urgent=urgent) == 0
        allowance.spend(size, now_us)
        spent += size
        slack = RATE * (BUCKET.burst_s + BUCKET.debt_s) + 20_000
        assert spent <= RATE * now_us / 1e6 + slack


def test_decodes_go_on_while_prefill_waits() -> None:
    allowance = Allowance(RATE)
    allowance.spend(int(RATE * BUCKET.burst_s) + 10_000, 0)
    assert allowance.wait_us(0, urgent=True) == 0
    assert allowance.wait_us(0) == pytest.approx(10_000, rel=0.01)
    allowance.spend(int(RATE * BUCKET.debt_s), 0)
    assert 0 < allowance.wait_us(0, urgent=True) < allowance.wait_us(0)


def test_without_a_rate_nothing_waits() -> None:
    allowance = Allowance()
    allowance.spend(10**15, 0)
    assert not allowance.limited
    assert allowance.wait_us(0) == 0


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan])
def test_a_rate_must_be_positive(rate: float) -> None:
    with pytest.raises(ValueError, match="rate"):
        Allowance(rate)


def test_a_new_month_starts_from_nothing() -> None:
    december = datetime(2026, 12, 31, 23, 59, tzinfo=UTC).timestamp()
    use = MonthlyUse.at(december).spent(5, december).spent(7, december)
    assert (use.month, use.used_bytes, use.next_month) == ("2026-12", 12, "2027-01-01")
    january = use.spent(3, december + 120)
    assert (january.month, january.used_bytes) == ("2027-01", 3)
    assert MonthlyUse(month="2026-09").next_month == "2026-10-01"


@pytest.mark.parametrize("wrong_s", [0.0, 1e9, 4e9])
def test_a_clock_that_was_wrong_for_a_while_gives_no_second_month(wrong_s: float) -> None:
    """A machine without a battery for its clock starts in 1970, and is set a while later."""
    now_s = datetime(2026, 11, 28, tzinfo=UTC).timestamp()
    use = MonthlyUse.at(now_s).spent(7, now_s).spent(5, wrong_s).spent(2, wrong_s)
    assert use.used_bytes == 7
    again = use.spent(3, now_s)
    assert (again.month, again.used_bytes) == ("2026-11", 10)
    assert again.spent(1, wrong_s).used_bytes == 8
