"""Where the contexts of a step are, page by page."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from node.attention.block_table import BlockTable
from node.attention.segment import Segment

PAGE = 4
CPU = torch.device("cpu")


def part_of(first: int, rows: int, context: int, pages: list[int], *, run: bool = False) -> Segment:
    """Rows of one session in a step; ``run``: whether its pages are consecutive."""
    return Segment(
        first=first,
        last=first + rows,
        context_tokens=context,
        slots=slice(0),
        pages=pages,
        run=run,
    )


@st.composite
def parts_of_a_step(draw: st.DrawFn) -> list[Segment]:
    made: list[Segment] = []
    at = 0
    for _ in range(draw(st.integers(1, 6))):
        rows = draw(st.integers(1, 9))
        context = rows + draw(st.integers(0, 20))
        count = -(-context // PAGE) + draw(st.integers(0, 2))  # some may be reserved ahead
        run = draw(st.booleans())
        start = draw(st.integers(0, 50))
        pages = list(range(start, start + count))
        if not run:
            pages = draw(st.permutations(pages))
        made.append(part_of(at, rows, context, pages, run=run))
        at += rows
    return made


@given(parts=parts_of_a_step(), size=st.integers(1, 5))
def test_every_row_is_in_one_block_and_every_page_in_its_place(
    parts: list[Segment], size: int
) -> None:
    rows = BlockTable.of(parts, PAGE, CPU)
    assert rows.decode == all(part.rows == 1 for part in parts)
    for part, segment, pages in zip(
        parts, rows.segments.tolist(), rows.pages.tolist(), strict=True
    ):
        assert segment == [part.first, part.rows, part.context_tokens]
        used = -(-part.context_tokens // PAGE)
        assert pages[:used] == part.pages[:used]
        assert used * PAGE <= rows.columns
    covered: list[int] = []
    for single in (True, False):
        block = rows.blocks(size, single=single)
        if block is None:
            assert not any((part.rows == 1) == single for part in parts)
            continue
        found: list[int] = []
        for session, first in block.blocks.tolist():
            part = parts[session]
            assert (part.rows == 1) == single
            assert first % size == 0
            found += [part.first + row for row in range(first, min(first + size, part.rows))]
        assert found == block.tokens.tolist()
        covered += found
    assert sorted(covered) == list(range(sum(part.rows for part in parts)))


def test_what_was_staged_before_is_gone() -> None:
    room = BlockTable.room(4, 40, PAGE, 77, CPU)
    assert room.decode
    assert room.columns == 40
    for count, context in ((3, 13), (1, 40), (4, 1), (2, 9)):
        parts = [
            part_of(at, 1, context, list(range(10 * at, 10 * at + 10)), run=True)
            for at in range(count)
        ]
        rows = BlockTable.of(parts, PAGE, CPU)
        room.stage(rows, 77)
        used = -(-context // PAGE)
        assert room.segments[:, 0].tolist() == [0, 1, 2, 3]
        assert room.segments[:, 1].tolist() == [1] * 4
        assert room.segments[:, 2].tolist() == [context] * count + [1] * (4 - count)
        assert torch.equal(room.pages[:count, :used], rows.pages[:, :used])
        assert (room.pages[count:, 0] == 77).all()
