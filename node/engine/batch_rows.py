"""Which rows of a packed step belong to which item."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from node.attention.paged_attention import Segment
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
    first: int = 0
    last: int = 0
    segment: Segment = field(init=False)
    features: list[torch.Tensor] = field(default_factory=list)
    """The item's features in front of its own layers so far, ``[rows, width]`` each."""

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
