"""Laws of copying a session's KV: what is sent when, and which way is taken."""

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from node.engine.work_item import WorkItem
from node.sessions.session import StageSession, StageState
from node.sessions.session_table import CopiedRows
from node.stage.moving import MOVING, KvCopyOut, Rebuild, Way
from tests.unit.node.sessions.test_session import make_open


@given(data=st.data(), row_bytes=st.integers(1, 5000), history=st.integers(1, 400))
def test_pieces_arrive_in_order_and_the_copy_catches_up(
    data: st.DataObject, row_bytes: int, history: int
) -> None:
    """The session goes on, the network drops, repeats and delays what the new stage says."""
    open_ = replace(make_open(prompt=history, new=600), copy_from="p0", migrate_until=1, hop=1)
    target = StageSession(open=open_, state=StageState.ACTIVE, importing=True)
    plan = KvCopyOut(row_bytes=row_bytes, piece_bytes=4096, ahead_bytes=16384)
    written, pieces, told = history, [], []
    for _ in range(data.draw(st.integers(0, 60))):
        match data.draw(st.sampled_from(["send", "send", "take", "say", "again", "decode"])):
            case "send" if (piece := plan.next(written)) is not None:
                pieces.append(piece)
            case "take" if pieces:
                piece = pieces.pop(0)
                assert target.take_kv(piece.position, piece.tokens)
                assert not target.take_kv(piece.position, piece.tokens), "a repeated piece"
                told.append(target.next_position)
            case "say" if told:
                assert plan.took(data.draw(st.sampled_from(told)))
            case "again" if told:
                assert plan.took(told[0])
            case "decode":
                written = min(written + 1, history + 500)
        ahead = (plan.sent - plan.taken) * row_bytes
        assert ahead <= max(plan.ahead_bytes, 4096, row_bytes)
        assert plan.taken <= target.next_position <= plan.sent <= written
    for _ in range(2000):  # everything arrives from now on
        if plan.is_warm(written):
            break
        piece = plan.next(written)
        if piece is not None:
            pieces.append(piece)
        while pieces:
            piece = pieces.pop(0)
            assert target.take_kv(piece.position, piece.tokens)
        assert plan.took(target.next_position)
    assert plan.is_warm(written)
    assert written - target.next_position <= MOVING.rest_rows


def test_what_was_never_sent_cannot_have_been_taken() -> None:
    plan = KvCopyOut(row_bytes=1, piece_bytes=10, ahead_bytes=20)
    assert plan.next(100) is not None
    assert not plan.took(11)
    assert not plan.took(-1)
    assert plan.took(10)
    assert not plan.is_warm(100)


def test_a_stage_that_gets_kv_takes_no_rows_and_runs_nothing() -> None:
    session = StageSession(open=make_open(hop=1), state=StageState.ACTIVE, importing=True)
    assert session.take_rows(0, torch.empty(3, 0)) is None
    first = StageSession(open=make_open(), state=StageState.ACTIVE, importing=True)
    assert first.add_inputs(0, (1, 2, 3))
    assert first.next_chunk(8) is None
    assert not session.take_kv(1, 2), "a gap"
    assert session.take_kv(0, 2)
    assert not session.take_kv(2, 1000), "more than was reserved"
    assert not StageSession(open=make_open(), state=StageState.ACTIVE).take_kv(0, 1)


KNOWN = Rebuild(
    tokens=1000,
    kv_row_bytes=16 << 10,
    row_bytes=2 << 10,
    kv_bytes_per_s=1e8,
    rows_bytes_per_s=1e8,
    row_s=2e-4,
    beside_rows=None,
    logged=True,
    stages_above=1,
)


@pytest.mark.parametrize(
    ("changes", "way"),
    [
        ({}, Way.COPY),
        ({"kv_bytes_per_s": 1e7}, Way.REPLAY),
        ({"kv_bytes_per_s": 1e7, "beside_rows": 10}, Way.COPY),
        ({"kv_bytes_per_s": 1e7, "beside_rows": 60}, Way.REPLAY),
        ({"kv_bytes_per_s": 0.0}, Way.REPLAY),
        ({"kv_bytes_per_s": 0.0, "logged": False}, Way.RERUN),
        ({"row_s": 1e-5}, Way.REPLAY),
        ({"kv_bytes_per_s": None, "rows_bytes_per_s": None}, Way.REPLAY),
    ],
)
def test_the_cheapest_way_is_taken(changes: dict[str, object], way: Way) -> None:
    assert replace(KNOWN, **changes).cheapest() is way  # type: ignore[arg-type]


@given(sizes=st.lists(st.integers(1, 20), max_size=12), steps=st.lists(st.integers(1, 9)))
def test_copied_rows_come_out_in_order_one_part_at_a_time(
    sizes: list[int], steps: list[int]
) -> None:
    copied, at, out = CopiedRows(), 0, 0
    for size in sizes:
        rows = torch.arange(at, at + size)[:, None]
        copied.add(WorkItem(session="s", start=0, end=1, position=at, hidden=rows))
        at += size
    for step in itertools.chain(steps, itertools.repeat(7)):
        taken = copied.take(step)
        if taken is None:
            break
        assert taken.hidden is not None
        assert copied.take(step) is None, "one part is in the engine"
        assert taken.position == out
        assert 1 <= taken.tokens <= step
        assert taken.hidden.flatten().tolist() == list(range(out, out + taken.tokens))
        out += taken.tokens
        copied.running = False
    assert out == at
