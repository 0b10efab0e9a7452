"""Block table of a step: where its rows' contexts are, page by page, for a kernel over pages."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from node.device.tensors import to_device


class PagedSegment(Protocol):
    """One session's rows in a step, and the pages of its context."""

    @property
    def first(self) -> int: ...

    @property
    def rows(self) -> int: ...

    @property
    def context_tokens(self) -> int: ...

    @property
    def pages(self) -> Sequence[int]: ...

    @property
    def run(self) -> bool: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBlocks:
    """Rows of a step, grouped for a kernel."""

    blocks: Tensor
    """``[blocks, 2]`` int32: the session, and the block's first row within the session."""
    tokens: Tensor
    """``[rows]`` int32: all rows in the blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
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
    _blocks: dict[tuple[int, bool], RowBlocks | None] = field(default_factory=dict)

    @classmethod
    def of(
        cls, parts: Sequence[PagedSegment], page_tokens: int, device: torch.device
    ) -> "BlockTable":
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
        cls, rows: int, columns: int, page_tokens: int, scrap_page: int, device: torch.device
    ) -> "BlockTable":
        """An empty table for steps of ``rows`` sessions with one row each and contexts of up to
        ``columns`` tokens. Until :meth:`stage`, all sessions attend to the first token of
        ``scrap_page``."""
        at = torch.arange(rows, dtype=torch.int32)
        ones = torch.ones(rows, dtype=torch.int32)
        pages = torch.full((rows, -(-columns // page_tokens)), scrap_page, dtype=torch.int32)
        made = cls(
            segments=torch.stack([at, ones, ones], dim=1).to(device),
            pages=pages.to(device),
            page_tokens=page_tokens,
            spans=(1,) * rows,
        )
        made.blocks(1, single=True)  # now: a graph's capture allows no transfer to the device
        return made

    def stage(self, rows: "BlockTable", scrap_page: int) -> None:
        """Write a decode step's sessions first; the other rows attend to ``scrap_page``."""
        count, wide = rows.pages.shape
        self.segments[:count, 2] = rows.segments[:, 2]
        self.segments[count:, 2] = 1
        self.pages[:count, :wide] = rows.pages
        self.pages[count:, 0] = scrap_page

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


AttendPages = Callable[
    [Tensor, Tensor, Tensor, BlockTable, Tensor | None, int, float, float], Tensor
]
"""Attention over pages: (query ``[1, heads, tokens, width]``, keys and values ``[slots, kv_heads,
width]``, rows, sinks, window, scale, softcap) → ``[1, tokens, heads, value width]``; see
:func:`node.kernels.triton_paged_attention.attend_pages`."""
