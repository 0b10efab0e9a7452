"""The KV of one layer, as rows of pages."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPool:
    """KV of one layer: ``[pages × page_tokens + 1, kv_heads, width]`` each."""

    keys: torch.Tensor
    values: torch.Tensor

    @property
    def scrap_row(self) -> int:
        """The last row, which belongs to no page: rows that only pad a step write here."""
        return int(self.keys.shape[0]) - 1

    def write(self, slots: torch.Tensor | slice, key: torch.Tensor, value: torch.Tensor) -> None:
        """Put ``[tokens, kv_heads, width]`` of new keys and values in their rows."""
        if isinstance(slots, slice):
            self.keys[slots] = key
            self.values[slots] = value
        else:
            self.keys.index_copy_(0, slots, key)
            self.values.index_copy_(0, slots, value)
