"""Gives a ``transformers`` model the pages and states of several sessions as one cache.

Each session has one row, along the batch dimension. Shorter contexts are padded in front, so that
all end together; an attention mask says where the padding is.
"""

from collections.abc import Sequence
from typing import Any

import torch

from node.attention.cache_view import PoolCache
from node.attention.paged_attention import Segment
from node.kv.layer_pool import LayerPool
from node.kv.session_state import StackedStates


class BatchedCache(PoolCache):
    """The caches of several sessions that each run one row."""

    def __init__(
        self, pools: dict[int, LayerPool], segments: Sequence[Segment], device: torch.device
    ) -> None:
        longest = max(segments, key=lambda segment: segment.context_tokens)
        super().__init__(pools, longest)
        self._sessions = len(segments)
        context = longest.context_tokens
        states = [segment.state for segment in segments if segment.state is not None]
        self.states = StackedStates(states)
        self._rows = torch.zeros(len(segments), context, dtype=torch.long, device=device)
        """Pool rows of the contexts, ``[sessions, tokens]``; padding is row 0, which is masked."""
        self.mask = torch.zeros(len(segments), context, dtype=torch.long, device=device)
        """1 for each token of a context, 0 for padding, ``[sessions, tokens]``."""
        for at, segment in enumerate(segments):
            slots, tokens = segment.slots, segment.context_tokens
            if isinstance(slots, slice):
                slots = torch.arange(slots.start, slots.stop, device=device)
            self._rows[at, context - tokens :] = slots
            self.mask[at, context - tokens :] = 1

    def _states_of(self, layer_idx: int) -> Any:
        return self.states.layer(layer_idx)

    def has_previous_state(
        self, layer_idx: int | None = None, state_idx: int | None = None
    ) -> bool:
        """True: each session has run tokens before."""
        return True

    def append(self, layer_idx: int, method: str, fresh: torch.Tensor) -> torch.Tensor:
        """Not supported for several sessions at once."""
        raise NotImplementedError("indexer keys of several sessions")

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write ``[sessions, kv_heads, 1, width]``, return those of the padded contexts."""
        if layer_idx in self._written:
            raise NotImplementedError("a layer that attends twice")
        pool = self._pools[layer_idx]
        pool.write(self._rows[:, -1], key[:, :, 0], value[:, :, 0])
        self._written.add(layer_idx)
        # Padding must be a number: masked scores are added to, and 0 × NaN is NaN.
        known = self.mask[..., None, None].bool()
        keys = torch.where(known, pool.keys[self._rows], 0)
        values = torch.where(known, pool.values[self._rows], 0)
        return keys.transpose(1, 2), values.transpose(1, 2)
