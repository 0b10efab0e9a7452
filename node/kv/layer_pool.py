"""KV of one layer, as rows of pages."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPool:
    """Keys and values of one layer, ``[pages × page_tokens + 1, kv_heads, width]`` each."""

    keys: torch.Tensor
    values: torch.Tensor

    @property
    def scrap_row(self) -> int:
        """The last row, which belongs to no page: padding rows of a step are written here."""
        return int(self.keys.shape[0]) - 1

    def copy(self, source: int, target: int, rows: int) -> None:
        """Copy ``rows`` rows from ``source`` on to ``target`` and behind."""
        self.keys[target : target + rows] = self.keys[source : source + rows]
        self.values[target : target + rows] = self.values[source : source + rows]

    def write(self, slots: torch.Tensor | slice, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write new keys and values, ``[tokens, kv_heads, width]`` each, to their rows."""
        if isinstance(slots, slice):
            self.keys[slots] = key
            self.values[slots] = value
        else:
            self.keys.index_copy_(0, slots, key)
            self.values.index_copy_(0, slots, value)
