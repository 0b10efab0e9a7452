"""Attention of a step in which every session has one row, for all sessions at once.

Each row sees the whole of its own context, so no causal mask is needed. Contexts are read through a
table of pool rows, padded to one width. If they are runs of pages and copying them would cost more
than extra calls, they are read one after the other instead. The function is written so that
``torch.jit.script`` accepts it, because traced layers
(:mod:`node.model.execution.torchscript_layers`) call it. With a table no shape depends on the
tensors' values, so that CUDA can record it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from node.attention.segment import Segment
from node.device.tensors import to_device


@dataclass(frozen=True, slots=True, kw_only=True)
class TableConfig:
    """How much a step copies into one table."""

    copied_bytes_max: int = 4 << 20
    """Maximum bytes of keys per layer in a step's table on a CPU, so that they stay in its
    caches."""
    padded_share_max: float = 2.0
    """Maximum size of a table, relative to the sum of the contexts."""
    padding_bytes_max: int = 64 << 20
    """Maximum bytes of keys and values that a mostly padded table may copy per layer: on an
    accelerator this takes less time than the launches of a loop over sessions."""
    table_bytes_max: int = 1 << 30
    """Maximum bytes of keys and values per layer in any table; they need memory beside the pool."""


TABLE = TableConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRows:
    """Where the contexts of a step's rows are in the pool: as a table, or as runs of pool rows."""

    spans: Tensor
    """``[rows, 2]`` int64: each context's first pool row and its number of tokens. The first row
    has no meaning if there is a table."""
    table: Tensor
    """``[rows, columns]`` int64: pool rows of each context. Beyond a context's end its last row is
    repeated, because unwritten rows may hold NaN. ``[0, 0]`` if each context is one run of pool
    rows, given by ``spans``."""


def decode_rows(
    contexts: Sequence[Segment],
    kv_bytes_per_token: int,
    page_tokens: int,
    device: torch.device,
    *,
    tables_only: bool,
) -> DecodeRows | None:
    """How to read the contexts of a decode step; None if neither a table nor runs are worth it.

    ``kv_bytes_per_token``: bytes of one layer's keys and values. ``tables_only`` allows no runs:
    graphs are captured with tables, and a loop over sessions is for steps that a table would pad
    too much, such as one long context beside many short ones.
    """
    lengths = [context.context_tokens for context in contexts]
    columns, rows = max(lengths), len(lengths)
    starts = [c.slots.start if isinstance(c.slots, slice) else -1 for c in contexts]
    runs = min(starts) >= 0
    fits = rows * columns <= TABLE.padded_share_max * sum(lengths)
    copied_bytes = rows * columns * kv_bytes_per_token
    if tables_only:
        by_table = copied_bytes <= (TABLE.table_bytes_max if fits else TABLE.padding_bytes_max)
        if not by_table:
            return None
    elif runs:  # reading a run copies nothing, but each run costs a call
        by_table = rows > 1 and fits and copied_bytes <= TABLE.copied_bytes_max
    elif fits:
        by_table = True
    else:
        return None
    spans = torch.tensor([starts, lengths]).T.contiguous()
    if not by_table:
        return DecodeRows(spans=spans, table=spans.new_empty(0, 0))
    pages = -(-columns // page_tokens)
    firsts = torch.zeros(rows, pages, dtype=torch.long)  # first pool row of each page
    for row, context in enumerate(contexts):
        slots = context.slots
        if isinstance(slots, slice):
            slots = torch.arange(slots.start, slots.stop, page_tokens)
            firsts[row, : len(slots)] = slots
        else:
            used = slots[::page_tokens]
            firsts[row, : len(used)] = used
    # Only page indices travel to the device; the rows within pages are computed there.
    spans, firsts = to_device(spans, device), to_device(firsts, device)
    at = torch.arange(columns, device=device).minimum(spans[:, 1:] - 1)
    table = firsts.gather(1, at // page_tokens) + at % page_tokens
    return DecodeRows(spans=spans, table=table)


def attend_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    spans: Tensor,
    table: Tensor,
    sinks: Tensor | None,
    window: int,
    scale: float,
    softcap: float,
) -> Tensor:
    """Write each row's key and value, and attend the row to its context.

    ``query`` is ``[1, heads, rows, width]``; ``key`` and ``value`` are ``[1, kv_heads, rows,
    width]``; ``keys`` and ``values`` are the pools; ``slots`` is the pool row of each row.
    ``window`` and ``softcap``: 0 means none. Returns ``[1, rows, heads, value width]``.
    """
    keys.index_copy_(0, slots, key[0].transpose(0, 1))
    values.index_copy_(0, slots, value[0].transpose(0, 1))
    heads, rows, width = query.size(1), query.size(2), query.size(3)
    kv_heads = keys.size(1)
    # A row sees all keys it is given, so the heads of a group can take the place of rows.
    grouped = query[0].transpose(0, 1).reshape(rows, kv_heads, heads // kv_heads, width)
    if table.size(0) > 0:
        columns = table.size(1)
        flat = table.reshape(-1)
        found = keys.index_select(0, flat).view(rows, columns, kv_heads, -1).transpose(1, 2)
        given = values.index_select(0, flat).view(rows, columns, kv_heads, -1).transpose(1, 2)
        at = torch.arange(columns, device=table.device)
        lengths = spans[:, 1:]
        allowed = at < lengths
        if window > 0:
            allowed = allowed & (at >= lengths - window)
        out = _weighed(grouped, found, given, allowed[:, None, None, :], sinks, scale, softcap)
        return out.reshape(1, rows, heads, -1)
    parts: list[Tensor] = []
    for row in range(rows):
        first, length = int(spans[row, 0]), int(spans[row, 1])
        if 0 < window < length:
            first, length = first + length - window, window
        found = keys.narrow(0, first, length).transpose(0, 1).unsqueeze(0)
        given = values.narrow(0, first, length).transpose(0, 1).unsqueeze(0)
        each = grouped.narrow(0, row, 1)
        parts.append(_weighed(each, found, given, None, sinks, scale, softcap))
    return torch.cat(parts).reshape(1, rows, heads, -1)


def _weighed(
    grouped: Tensor,
    keys: Tensor,
    values: Tensor,
    allowed: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    softcap: float,
) -> Tensor:
    """Attention with scores and mask, ``[rows, kv_heads, group, value width]``; see
    :func:`node.attention.paged_attention._attend_explicitly`."""
    if sinks is None and softcap == 0.0:
        return F.scaled_dot_product_attention(grouped, keys, values, attn_mask=allowed, scale=scale)
    scores = torch.matmul(grouped, keys.transpose(2, 3)) * scale
    if softcap > 0.0:
        scores = torch.tanh(scores / softcap) * softcap
    if allowed is not None:
        scores = scores.masked_fill(~allowed, float("-inf"))
    scores = scores.float()
    if sinks is None:
        return torch.matmul(torch.softmax(scores, dim=-1).to(values.dtype), values)
    beside = sinks.float().view(1, grouped.size(1), grouped.size(2), 1)
    scores = torch.cat([scores, beside.expand(grouped.size(0), -1, -1, -1)], dim=-1)
    shares = torch.softmax(scores, dim=-1).to(values.dtype)
    return torch.matmul(shares[..., :-1], values)
