"""Which rows of a packed step belong to which item."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from node.attention.paged_attention import Segment
from node.engine.work_item import WorkItem
from node.kv.block_manager import Reservation


@dataclass(slots=True, kw_only=True)
class StepRows:
    """An item of a step, and its rows ``[first, last)`` in the packed batch."""

    index: int
    """Index of the item among those given to the step."""
    item: WorkItem
    reservation: Reservation
    first: int = 0
    last: int = 0
    segment: Segment = field(init=False)


def joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The parts concatenated; a single part is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
