"""Gives a ``transformers`` model one session's pages as its cache.

For families whose layers do not call attention through the interface, or add a bias that their own
forward computes. They run session by session, with this view of the page pool as their cache.
"""

from typing import Any

import torch

from node.attention.paged_attention import KvShapeFound, Segment
from node.kv.layer_pool import LayerPool


class PoolCache:
    """The cache interface that models need; a model that keeps other state fails here."""

    is_compileable = False

    def __init__(self, pools: dict[int, LayerPool], segment: Segment) -> None:
        self._pools = pools
        self._segment = segment
        self._written: set[int] = set()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"its cache holds more than keys and values ({name})")

    @property
    def calls(self) -> int:
        """Number of layers that wrote."""
        return len(self._written)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Number of tokens that the layer holds."""
        segment = self._segment
        return segment.context_tokens if layer_idx in self._written else segment.position

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Position of the first new row."""
        return self._segment.position

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """``(keys, offset of the first key)``; pages hold a session from its first token on."""
        return self._segment.position + query_length, 0

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        """-1: the cache grows without a fixed length."""
        return -1

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write ``[1, kv_heads, tokens, width]``, return keys and values of the whole context."""
        if layer_idx in self._written:
            raise NotImplementedError("a layer that attends twice")
        segment, pool = self._segment, self._pools[layer_idx]
        slots = segment.slots
        if isinstance(slots, slice):
            fresh: slice | torch.Tensor = slice(slots.start + segment.position, slots.stop)
        else:
            fresh = slots[segment.position :]
        pool.write(fresh, key[0].transpose(0, 1), value[0].transpose(0, 1))
        self._written.add(layer_idx)
        return (
            pool.keys[slots].transpose(0, 1)[None],
            pool.values[slots].transpose(0, 1)[None],
        )


class LookingCache(PoolCache):
    """Ends a trial run of a layer: where it would write, :class:`KvShapeFound` is raised."""

    def __init__(self, tokens: int) -> None:
        super().__init__(
            {}, Segment(first=0, last=tokens, context_tokens=tokens, slots=slice(0, tokens))
        )

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Raises KvShapeFound."""
        raise KvShapeFound(layer_idx, key.shape[1], key.shape[-1], value.shape[-1])
