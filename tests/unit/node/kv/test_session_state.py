"""Positions from which a session's states let rows go on."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from node.kv.session_state import SessionState


def run(state: SessionState, position: int, ids: list[int]) -> None:
    """A step in which one layer folds token ids into its state."""
    state.begin(position)
    kept = state.layer(3)
    known = kept.recurrent_states[0] if kept.is_recurrent_states_initialized[0] else None
    folded = torch.zeros(1) if known is None else known.clone()
    for token_id in ids:
        folded = (folded * 7 + token_id + 1) % 1009
    kept.update_recurrent_state(folded)
    state.ran(position + len(ids))


def folded(ids: list[int]) -> float:
    value = 0.0
    for token_id in ids:
        value = (value * 7 + token_id + 1) % 1009
    return value


def test_rows_go_on_from_the_newest_step_its_beginning_or_the_first_token() -> None:
    state = SessionState(1)
    assert state.resumable(5) == 0
    run(state, 0, [1, 2, 3])
    run(state, 3, [4, 5])
    assert [state.resumable(at) for at in (9, 5, 4, 3, 2)] == [5, 5, 3, 3, 0]
    with pytest.raises(ValueError, match="position 4 asked"):
        state.begin(4)


def test_a_step_that_failed_midway_is_begun_again() -> None:
    state = SessionState(1)
    run(state, 0, [1, 2, 3])
    state.begin(3)
    state.layer(3).recurrent_states[0].fill_(99.0)
    assert state.resumable(4) == 3
    run(state, 3, [4])
    assert state.layer(3).recurrent_states[0].item() == folded([1, 2, 3, 4])


@given(
    steps=st.lists(
        st.tuples(st.lists(st.integers(0, 50), min_size=1, max_size=4), st.integers(0, 12)),
        min_size=1,
        max_size=12,
    )
)
def test_states_are_those_of_the_tokens_before_them(
    steps: list[tuple[list[int], int]],
) -> None:
    """Steps that go on, or back to where rows can go on, and there run other tokens."""
    state, seen = SessionState(1), list[int]()
    for ids, wanted in steps:
        at = state.resumable(min(wanted, len(seen)))
        assert at <= wanted
        seen = [*seen[:at], *ids]
        run(state, at, ids)
        assert state.layer(3).recurrent_states[0].item() == folded(seen)
        assert state.resumable(len(seen)) == len(seen)
