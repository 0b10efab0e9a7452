"""When a full stage expects room."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.admission import RETRY_LEAST_S, RETRY_MOST_S, Holding, retry_after_s

holdings = st.lists(
    st.builds(
        Holding,
        kv_tokens=st.integers(1, 100),
        ran_tokens=st.integers(0, 100),
        age_s=st.floats(0, 1e4),
    ),
    max_size=8,
)


def test_the_session_that_ends_first_with_enough_decides() -> None:
    soon = Holding(kv_tokens=10, ran_tokens=9, age_s=9.0)  # 1 s left
    later = Holding(kv_tokens=50, ran_tokens=25, age_s=25.0)  # 25 s left
    assert retry_after_s(8, 0, [later, soon]) == pytest.approx(1.0)
    assert retry_after_s(11, 0, [later, soon]) == pytest.approx(25.0)
    assert retry_after_s(11, 1, [later, soon]) == pytest.approx(1.0)
    assert retry_after_s(5, 5, [later]) == RETRY_LEAST_S


def test_what_will_never_fit_gets_no_promise() -> None:
    assert retry_after_s(100, 0, [Holding(kv_tokens=50, ran_tokens=0, age_s=1.0)]) == 0.0


@pytest.mark.property
@given(needed=st.integers(1, 500), free=st.integers(0, 500), holding=holdings)
def test_bounds_and_order(needed: int, free: int, holding: list[Holding]) -> None:
    after_s = retry_after_s(needed, free, holding)
    if free + sum(h.kv_tokens for h in holding) < needed:
        assert after_s == 0.0
    else:
        assert RETRY_LEAST_S <= after_s <= RETRY_MOST_S
        assert retry_after_s(needed, free + 1, holding) <= after_s
