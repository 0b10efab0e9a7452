"""Which differences between two clocks are a jump."""

import pytest

from node.peer.clock_watch import ClockWatch, jump_text


@pytest.mark.parametrize("jump_s", [-8 * 3600.0, -20.0, 20.0, 1e9])
def test_a_jump_is_seen_once(jump_s: float) -> None:
    watch = ClockWatch()
    assert watch.look(1000.0, 0.0) == 0.0
    assert watch.look(1001.0, 1.0) == 0.0
    assert watch.look(1002.0 + jump_s, 2.0) == pytest.approx(jump_s)
    assert watch.look(1003.0 + jump_s, 3.0) == 0.0


def test_a_time_server_that_slews_is_none() -> None:
    watch = ClockWatch()
    assert not any(watch.look(1000.0 + 1.0005 * second, second) for second in range(10_000))


def test_the_owner_is_told_which_way() -> None:
    assert "8 hours back" in jump_text(-8 * 3600.0)
    assert "20 s ahead" in jump_text(20.0)
