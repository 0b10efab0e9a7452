"""Rows that a session brings along when it moves: kept until the engine has time for them."""

from collections import deque
from dataclasses import dataclass, field, replace

import torch

from node.links.wire_rows import Rows
from node.sessions.session import Chunk


@dataclass(slots=True)
class CopiedRows:
    """Chunks in their order, taken in other sizes than they came in, one at a time."""

    running: bool = False
    """Whether what was taken last is still in the engine."""
    _waiting: deque[tuple[Chunk, torch.Tensor]] = field(default_factory=deque)

    def add(self, chunk: Chunk, rows: Rows) -> None:
        """Keep the rows of the next positions."""
        self._waiting.append((chunk, rows.tensor))

    def take(self, tokens: int) -> tuple[Chunk, Rows] | None:
        """The next rows, ``tokens`` at most; None while some run or none wait."""
        if self.running or not self._waiting:
            return None
        first = self._waiting[0][0]
        parts: list[torch.Tensor] = []
        left = tokens
        while left > 0 and self._waiting:
            chunk, tensor = self._waiting.popleft()
            parts.append(tensor[:left])
            if chunk.tokens > left:
                rest = replace(chunk, position=chunk.position + left, tokens=chunk.tokens - left)
                self._waiting.appendleft((rest, tensor[left:]))
            left -= min(left, chunk.tokens)
        self.running = True
        rows = parts[0] if len(parts) == 1 else torch.cat(parts)
        return replace(first, tokens=int(rows.shape[0])), Rows(tensor=rows)
