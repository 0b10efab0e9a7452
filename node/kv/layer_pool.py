"""KV of one layer, as rows of pages."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

WriteRows = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
"""Interface of :func:`node.kernels.triton.kv_rows.write_rows`."""


class KvShape(NamedTuple):
    """Keys and values that a layer keeps per token; all 0 where it keeps none."""

    kv_heads: int = 0
    key_width: int = 0
    value_width: int = 0
    indexer_width: int = 0
    """Width of the keys by which a sparse attention's indexer chooses tokens, one per token."""

    @property
    def parts(self) -> tuple[tuple[int, int], ...]:
        """``(heads, width)`` of keys, of values and, where there are any, of indexer keys."""
        pair = (self.kv_heads, self.key_width), (self.kv_heads, self.value_width)
        return (*pair, (1, self.indexer_width)) if self.indexer_width else pair

    @property
    def numbers(self) -> int:
        """Numbers per token."""
        return sum(heads * width for heads, width in self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPool:
    """Keys and values of one layer, ``[pages × page_tokens + 1, kv_heads, width]`` each."""

    keys: torch.Tensor
    values: torch.Tensor
    indexer: torch.Tensor | None = None
    """Indexer keys, ``[pages × page_tokens + 1, 1, width]``, of a layer that has any."""
    write_rows: WriteRows | None = None
    """Writes keys and values in one launch; None: torch writes them."""

    @classmethod
    def empty(
        cls,
        shape: KvShape,
        rows: int,
        dtype: torch.dtype,
        device: torch.device,
        write_rows: WriteRows | None = None,
    ) -> "LayerPool":
        """A pool of ``rows`` rows that hold no numbers yet; the last one is zero."""
        made = [torch.empty(rows, *part, dtype=dtype, device=device) for part in shape.parts]
        for part in made:
            part[-1] = 0
        indexer = made[2] if made[2:] else None
        return cls(keys=made[0], values=made[1], indexer=indexer, write_rows=write_rows)

    @property
    def parts(self) -> tuple[torch.Tensor, ...]:
        """Keys, values and, where there are any, indexer keys."""
        pair = self.keys, self.values
        return pair if self.indexer is None else (*pair, self.indexer)

    @property
    def scrap_row(self) -> int:
        """The last row, which belongs to no page: padding rows of a step are written here."""
        return int(self.keys.shape[0]) - 1

    def copy(self, source: int, target: int, rows: int) -> None:
        """Copy ``rows`` rows from ``source`` on to ``target`` and behind."""
        for part in self.parts:
            part[target : target + rows] = part[source : source + rows]

    def write(self, slots: torch.Tensor | slice, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write new keys and values, ``[tokens, kv_heads, width]`` each, to their rows."""
        if isinstance(slots, slice):
            self.keys[slots] = key
            self.values[slots] = value
        elif self.write_rows is not None:
            self.write_rows(self.keys, self.values, slots, key, value)
        else:
            self.keys.index_copy_(0, slots, key)
            self.values.index_copy_(0, slots, value)
