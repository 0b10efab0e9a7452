"""Block table of a step: where its rows' contexts are, page by page, for a kernel over pages."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from node.attention.segment import Segment
from node.device.tensors import to_device

CHUNKS_MAX = 8
"""Maximum number of sessions with several rows in a step, for which an empty table has room."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBlocks:
    """Rows of a step, grouped for a kernel."""

    blocks: Tensor
    """``[blocks, 2]`` int32: the session, and the block's first row within the session."""
    tokens: Tensor
    """``[rows]`` int32: all rows in the blocks; -1 for none."""


@dataclass(frozen=True, kw_only=True)
class BlockTable:
    """Sessions of a step: their rows, and the pages of their contexts."""

    segments: Tensor
    """``[sessions, 3]`` int32: each session's first row, its number of rows, and the number of
    tokens that its last row attends to."""
    pages: Tensor
    """``[sessions, most pages]`` int32; values beyond a context's end are arbitrary."""
    page_tokens: int
    spans: tuple[int, ...]
    """Number of rows of each session, on the CPU."""
    room_rows: int = 0
    """Number of rows of the steps that :meth:`stage` writes to an empty table; 0 for a step's own
    table."""
    chunked: bool = False
    """Whether such steps have sessions with several rows."""
    _blocks: dict[tuple[int, bool], RowBlocks | None] = field(default_factory=dict)

    @classmethod
    def of(cls, parts: Sequence[Segment], page_tokens: int, device: torch.device) -> "BlockTable":
        """The table of a step's sessions, in the order of their rows, with their pages."""
        used = [-(-part.context_tokens // page_tokens) for part in parts]
        firsts = torch.tensor([part.pages[0] for part in parts], dtype=torch.int32)
        pages = firsts[:, None] + torch.arange(max(used), dtype=torch.int32)
        table = pages.numpy()  # numpy copies an array 20 times as fast as torch a list
        for at, part in enumerate(parts):
            if not part.run:
                table[at, : used[at]] = part.pages[: used[at]]
        segments = torch.tensor(
            [(part.first, part.rows, part.context_tokens) for part in parts], dtype=torch.int32
        )
        return cls(
            segments=to_device(segments, device),
            pages=to_device(pages, device),
            page_tokens=page_tokens,
            spans=tuple(part.rows for part in parts),
        )

    @classmethod
    def room(
        cls,
        rows: int,
        columns: int,
        page_tokens: int,
        scrap_page: int,
        device: torch.device,
        *,
        chunked: bool = False,
    ) -> "BlockTable":
        """An empty table for steps of ``rows`` rows and contexts of up to ``columns`` tokens: of
        one row each, unless they are ``chunked``. Until :meth:`stage`, each row is a session that
        attends to the first token of ``scrap_page``; if chunked, one behind them has no rows."""
        sessions = rows + chunked
        at = torch.arange(sessions, dtype=torch.int32)
        segments = torch.stack([at, torch.ones_like(at), torch.ones_like(at)], dim=1)
        segments[rows:] = torch.tensor([0, 0, 1])
        pages = torch.full((sessions, -(-columns // page_tokens)), scrap_page, dtype=torch.int32)
        made = cls(
            segments=segments.to(device),
            pages=pages.to(device),
            page_tokens=page_tokens,
            spans=(1,) * rows,
            room_rows=rows,
            chunked=chunked,
        )
        if not chunked:
            made.blocks(1, single=True)  # now: a graph's capture allows no transfer to the device
        return made

    def stage(self, rows: "BlockTable", scrap_page: int) -> None:
        """Write a step's sessions first; each row of padding is a session that attends to
        ``scrap_page``."""
        count, wide = rows.pages.shape
        self.pages[:count, :wide] = rows.pages
        self.pages[count:, 0] = scrap_page
        if not self.chunked:
            self.segments[:count, 2] = rows.segments[:, 2]
            self.segments[count:, 2] = 1
            return
        first, last = sum(rows.spans), self.room_rows
        padding = self._numbers[first:last]
        behind = count + last - first
        self.segments[:count] = rows.segments
        self.segments[count:behind, 0] = padding
        self.segments[count:behind, 1:] = 1
        self.segments[behind:, :2] = 0
        self.segments[behind:, 2] = 1
        for (size, single), own in self._blocks.items():
            given = rows.blocks(size, single=single)
            blocks = tokens = 0
            if own is None:
                continue
            if given is not None:
                blocks, tokens = len(given.blocks), len(given.tokens)
                own.blocks[:blocks] = given.blocks
                own.tokens[:tokens] = given.tokens
            if single:
                own.blocks[blocks : blocks + len(padding), 0] = self._numbers[count:behind]
                own.blocks[blocks : blocks + len(padding), 1] = 0
                own.tokens[tokens : tokens + len(padding)] = padding
                blocks, tokens = blocks + len(padding), tokens + len(padding)
            own.blocks[blocks:, 0] = last  # the session without rows
            own.blocks[blocks:, 1] = 0
            own.tokens[tokens:] = -1

    @cached_property
    def _numbers(self) -> Tensor:
        """0, 1, 2, … on the device, to copy from."""
        return torch.arange(self.room_rows + 1, dtype=torch.int32, device=self.segments.device)

    @property
    def decode(self) -> bool:
        """Whether each session has one row."""
        return all(rows == 1 for rows in self.spans)

    @property
    def columns(self) -> int:
        """Number of tokens that the pages of the longest context hold."""
        return int(self.pages.shape[1]) * self.page_tokens

    def blocks(self, rows: int, *, single: bool) -> RowBlocks | None:
        """Rows in blocks of at most ``rows``: of sessions with one row if ``single``, otherwise of
        the other sessions. None if there are none. Made once per step."""
        key = (rows, single)
        if key not in self._blocks:
            self._blocks[key] = self._cut(rows, single)
        return self._blocks[key]

    def _cut(self, rows: int, single: bool) -> RowBlocks | None:
        if self.chunked:
            return self._room_for_blocks(rows, single)
        cut: list[tuple[int, int]] = []
        tokens: list[int] = []
        at = 0
        for session, span in enumerate(self.spans):
            if (span == 1) == single:
                cut.extend((session, first) for first in range(0, span, rows))
                tokens.extend(range(at, at + span))
            at += span
        if not cut:
            return None
        device = self.segments.device
        return RowBlocks(
            blocks=to_device(torch.tensor(cut, dtype=torch.int32), device),
            tokens=to_device(torch.tensor(tokens, dtype=torch.int32), device),
        )

    def _room_for_blocks(self, rows: int, single: bool) -> RowBlocks:
        """As many blocks as a step with chunks can have; until :meth:`stage` they have no rows."""
        device, last = self.segments.device, self.room_rows
        count = last if single else last // rows + CHUNKS_MAX
        blocks = torch.zeros(count, 2, dtype=torch.int32, device=device)
        blocks[:, 0] = last
        tokens = torch.full((last,), -1, dtype=torch.int32, device=device)
        return RowBlocks(blocks=blocks, tokens=tokens)


AttendPages = Callable[
    [Tensor, Tensor, Tensor, BlockTable, Tensor | None, int, float, float], Tensor
]
"""Attention over pages: (query ``[1, heads, tokens, width]``, keys and values ``[slots, kv_heads,
width]``, rows, sinks, window, scale, softcap) → ``[1, tokens, heads, value width]``; see
:func:`node.kernels.triton.paged_attention.attend_pages`."""
