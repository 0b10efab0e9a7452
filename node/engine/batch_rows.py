"""Which rows of a packed step belong to which item."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from node.attention.segment import Segment
from node.device.tensors import to_device
from node.engine.work_item import WorkItem
from node.kv.block_manager import Reservation


@dataclass(slots=True, kw_only=True)
class StepRows:
    """An item of a step, and its rows ``[first, last)`` in the packed batch."""

    index: int
    """Index of the item among those given to the step."""
    item: WorkItem
    reservation: Reservation
    again: torch.Tensor | None = None
    """Rows, ``[rows, width]``, that ran before the item's own and run again in front of them: a
    state that its session keeps was last known there."""
    first: int = 0
    last: int = 0
    segment: Segment = field(init=False)
    features: list[torch.Tensor] = field(default_factory=list)
    """The item's features in front of its own layers so far, ``[rows, width]`` each."""

    @property
    def position(self) -> int:
        """Position of the first row, which may run again."""
        return self.item.position - (0 if self.again is None else len(self.again))

    @property
    def tokens(self) -> int:
        """Number of rows, with those that run again."""
        return self.item.tokens + (0 if self.again is None else len(self.again))

    def take_again(self) -> None:
        """Find the rows that have to run again: drafted ones that were right."""
        state = self.reservation.state
        self.again = None if state is None else state.again(self.item.position)

    def again_alone(self) -> "StepRows":
        """Those rows as an item of their own, of which only what its states become is wanted."""
        assert self.again is not None  # noqa: S101
        alone = replace(
            self.item,
            position=self.position,
            hidden=self.again,
            token_ids=None,
            drafts=(),
            features=None,
        )
        return StepRows(index=self.index, item=alone, reservation=self.reservation)

    def ran_again(self) -> None:
        """Those rows have run alone."""
        assert self.reservation.state is not None  # noqa: S101
        self.reservation.state.ran(self.item.position)
        self.again = None

    def keep(self, hidden: torch.Tensor) -> None:
        """Let the session keep its rows of ``hidden``, ``[tokens, width]``, where some may be taken
        back."""
        if self.reservation.state is not None:
            kept = self.item.drafts or self.again is not None
            rows = hidden[self.first : self.last].clone() if kept else None
            self.reservation.state.keep(rows)

    def look(self, layer: int, hidden: torch.Tensor) -> None:
        """Keep what goes into ``layer`` if it is among the item's features; ``hidden`` is
        ``[tokens, width]``."""
        wanted = self.item.features
        if wanted is not None and layer in wanted.layers:
            # A copy: few of the rows are kept, and a layer may write over its input.
            self.features.append(hidden[self.last - wanted.rows : self.last].clone())

    def joined_features(self, like: torch.Tensor) -> torch.Tensor | None:
        """All of the item's features, ``[rows, width × layers]``, with the device and dtype of
        ``like``; None without any."""
        wanted = self.item.features
        if wanted is None:
            return None
        came = [] if wanted.came is None else [to_device(wanted.came, like.device).to(like.dtype)]
        return torch.cat([*came, *self.features], dim=1)


def joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The parts, ``[rows, …]`` each, one behind the other; a single part is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def own_rows(ordered: Sequence[StepRows], hidden: torch.Tensor) -> torch.Tensor:
    """``hidden``, ``[tokens, width]``, without rows that ran again; counts the others anew."""
    if all(row.again is None for row in ordered):
        return hidden
    parts, at = [], 0
    for row in ordered:
        parts.append(hidden[row.last - row.item.tokens : row.last])
        row.first, row.last = at, at + row.item.tokens
        at = row.last
    return torch.cat(parts)
