"""Queues the rows that a moving session brings along until the engine has time for them."""

from collections import deque
from dataclasses import dataclass, field, replace

import torch

from node.engine.work_item import WorkItem


@dataclass(slots=True)
class CopiedRows:
    """Items in order, taken one at a time, in other sizes than they came in."""

    running: bool = False
    """Whether the item taken last is still in the engine."""
    _waiting: deque[WorkItem] = field(default_factory=deque)

    def add(self, item: WorkItem) -> None:
        """Add the rows of the next positions."""
        self._waiting.append(item)

    def take(self, tokens: int) -> WorkItem | None:
        """The next rows, at most ``tokens``; None while some run or none wait."""
        if self.running or not self._waiting:
            return None
        first = self._waiting[0]
        parts: list[torch.Tensor] = []
        left = tokens
        while left > 0 and self._waiting:
            item = self._waiting.popleft()
            if item.hidden is None:
                raise ValueError("an item without rows")
            parts.append(item.hidden[:left])
            if item.tokens > left:
                rest = replace(item, position=item.position + left, hidden=item.hidden[left:])
                self._waiting.appendleft(rest)
            left -= min(left, item.tokens)
        self.running = True
        return replace(first, hidden=parts[0] if len(parts) == 1 else torch.cat(parts))
