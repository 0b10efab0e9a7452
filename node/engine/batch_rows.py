"""The rows of a step: which item each belongs to, packed one behind the other."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from node.attention.paged_attention import Segment
from node.engine.work_item import WorkItem
from node.kv.block_manager import Reservation


@dataclass(slots=True, kw_only=True)
class StepRows:
    """An item that takes part in a step, and its rows ``[first, last)`` in the packed batch."""

    index: int
    """Of the item among those that the step was given."""
    item: WorkItem
    reservation: Reservation
    first: int = 0
    last: int = 0
    segment: Segment = field(init=False)


def joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The parts one behind the other; a single one is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
