"""Laws of the log of rows that were sent on."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.sessions.activation_log import ActivationLog

ROW = 4


def row(session: str, position: int, run: int = 0) -> bytes:
    """What a row would be: the same for the same session and position."""
    return bytes([ord(session), position % 256, position // 256, run])


def rows(session: str, start: int, end: int) -> bytes:
    return b"".join(row(session, at) for at in range(start, end))


@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from("abc"),
            st.integers(1, 9),
            st.integers(0, 6),
            st.sampled_from(["append", "truncate", "forget"]),
        ),
        max_size=40,
    ),
    bytes_max=st.integers(0, 200),
)
def test_what_is_covered_is_right_and_the_bound_holds(
    steps: list[tuple[str, int, int, str]], bytes_max: int
) -> None:
    log = ActivationLog(ROW, bytes_max)
    ends: dict[str, int] = {}
    for session, count, back, what in steps:
        end = ends.get(session, 0)
        at = max(0, end - back)
        if what == "append":
            log.append(session, at, rows(session, at, at + count))
            ends[session] = at + count
        elif what == "truncate":
            log.truncate(session, at)
            ends[session] = min(end, at)
        else:
            log.forget(session)
            ends.pop(session, None)
        assert log.bytes_held <= bytes_max
        for name, last in ends.items():
            for start in range(last + 1):
                if log.covers(name, start, last):
                    assert log.rows(name, start, last) == rows(name, start, last)
            assert not log.covers(name, 0, last + 1)
    for name in list(ends):
        log.forget(name)
    assert log.bytes_held == 0


def test_the_oldest_session_is_dropped_first_and_keeps_its_newest_rows() -> None:
    log = ActivationLog(ROW, bytes_max=10 * ROW)
    log.append("a", 0, rows("a", 0, 6))
    log.append("b", 0, rows("b", 0, 4))
    assert log.covers("a", 0, 6)
    log.append("b", 4, rows("b", 4, 5))
    assert not log.covers("a", 0, 6)
    assert log.covers("b", 0, 5)
    assert log.dropped == 1
    log.append("a", 6, rows("a", 6, 7))
    log.append("a", 7, rows("a", 7, 8))
    assert log.covers("a", 7, 8)
    assert not log.covers("a", 6, 8)


def test_a_session_larger_than_the_bound_is_not_kept() -> None:
    log = ActivationLog(ROW, bytes_max=3 * ROW)
    log.append("a", 0, rows("a", 0, 5))
    assert log.bytes_held == 0
    assert not log.covers("a", 0, 5)
    with pytest.raises(KeyError):
        log.rows("a", 0, 5)


def test_rows_made_again_replace_the_old_ones() -> None:
    log = ActivationLog(ROW, bytes_max=100)
    log.append("a", 0, rows("a", 0, 5))
    log.append("a", 3, row("a", 3, run=1))
    assert log.rows("a", 3, 4) == row("a", 3, run=1)
    assert log.end("a") == 4


def test_half_rows_are_a_mistake_of_ours() -> None:
    with pytest.raises(ValueError, match="no rows"):
        ActivationLog(ROW, 100).append("a", 0, b"123")
