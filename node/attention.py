"""Attention over the paged KV pool, registered with ``transformers`` as an attention function.

The model's own code stays untouched: it calls :func:`paged_attention` in every layer, which finds
the running step in a thread-local variable, because not every family passes keywords through.
Queries of all sessions in the step come packed in one row, ``[1, heads, tokens, width]``.
"""

import threading
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

ATTENTION_NAME = "anabranch_paged"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPool:
    """KV of one layer: ``[pages × page_tokens, kv_heads, width]`` each."""

    keys: torch.Tensor
    values: torch.Tensor


@dataclass(slots=True, kw_only=True)
class Segment:
    """Rows ``[first, last)`` of the step belong to one session whose context ends with them."""

    first: int
    last: int
    context_tokens: int
    """Tokens attended to by the last row, itself included."""
    slots: torch.Tensor | slice
    """Pool rows of the whole context: a slice where the pages are one run."""
    masks: dict[int, torch.Tensor | None] = field(default_factory=dict)
    """Causal masks by sliding window (0: none), made once per step."""

    def mask(self, window: int, device: torch.device) -> torch.Tensor | None:
        """Which of the context each row may see, ``[rows, context]``; None: all of it."""
        if window not in self.masks:
            self.masks[window] = _mask(self.last - self.first, self.context_tokens, window, device)
        return self.masks[window]


def _mask(rows: int, context: int, window: int, device: torch.device) -> torch.Tensor | None:
    if rows == 1 and not 0 < window < context:
        return None
    position = torch.arange(context - rows, context, device=device)[:, None]
    key = torch.arange(context, device=device)[None, :]
    allowed = key <= position
    return allowed & (key > position - window) if window else allowed


@dataclass(slots=True, kw_only=True)
class Step:
    """What the attention function must know of the running step."""

    pools: dict[int, LayerPool]
    """By layer index."""
    write_slots: torch.Tensor | slice
    """Pool rows of the step's new tokens, ``[tokens]``; a slice where they are consecutive."""
    segments: list[Segment]
    calls: int = 0
    """How often attention was called."""


class _Running(threading.local):
    step: Step | None = None


_running = _Running()


def set_step(step: Step | None) -> None:
    """Name the step that this thread's next attention calls belong to."""
    _running.step = step


def paged_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Write the new keys and values, attend each session to its own context.

    ``query`` is ``[1, heads, tokens, width]``, ``key`` and ``value`` ``[1, kv_heads, tokens,
    width]``; returns ``[1, tokens, heads, width]``. Raises NotImplementedError for what it cannot
    compute, which makes the model unservable at load rather than wrong later.
    """
    step = _running.step
    if step is None:
        raise RuntimeError("paged attention was called outside a step")
    if softcap is not None or s_aux is not None:
        raise NotImplementedError("attention with soft-capping or sinks")
    if key.shape[-1] != value.shape[-1]:
        raise NotImplementedError("keys and values of different width")
    step.calls += 1
    pool = step.pools[module.layer_idx]
    if isinstance(step.write_slots, slice):
        pool.keys[step.write_slots] = key[0].transpose(0, 1)
        pool.values[step.write_slots] = value[0].transpose(0, 1)
    else:
        pool.keys.index_copy_(0, step.write_slots, key[0].transpose(0, 1))
        pool.values.index_copy_(0, step.write_slots, value[0].transpose(0, 1))
    window = sliding_window or 0
    parts = [_attend(query, pool, segment, window, scaling) for segment in step.segments]
    return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)), None


def _attend(
    query: torch.Tensor, pool: LayerPool, segment: Segment, window: int, scaling: float | None
) -> torch.Tensor:
    """One session's rows, ``[1, rows, heads, width]``."""
    keys = pool.keys[segment.slots].transpose(0, 1)[None]  # [1, kv_heads, context, width]
    values = pool.values[segment.slots].transpose(0, 1)[None]
    rows = segment.last - segment.first
    heads, kv_heads = query.shape[1], keys.shape[1]
    part = query[:, :, segment.first : segment.last]
    if rows == 1:
        # A single row sees all it is given, so the heads of a group can be its rows.
        if 0 < window < segment.context_tokens:
            keys, values = keys[:, :, -window:], values[:, :, -window:]
        grouped = part.reshape(1, kv_heads, heads // kv_heads, -1)
        out = F.scaled_dot_product_attention(grouped, keys, values, scale=scaling)
        return out.reshape(1, 1, heads, -1)
    causal = rows == segment.context_tokens and not 0 < window < rows
    out = F.scaled_dot_product_attention(
        part,
        keys,
        values,
        attn_mask=None if causal else segment.mask(window, query.device),
        is_causal=causal,
        scale=scaling,
        enable_gqa=heads != kv_heads,
    )
    return out.transpose(1, 2)


def no_mask(*_: Any, **__: Any) -> None:
    """``transformers`` need not build masks for :func:`paged_attention`."""


def register() -> None:
    """Make the function known to ``transformers`` under :data:`ATTENTION_NAME`."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(ATTENTION_NAME, paged_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, no_mask)
