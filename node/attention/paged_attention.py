"""Attention over the paged KV pool, registered with ``transformers`` as an attention function.

The model's own code stays untouched. It calls :func:`paged_attention` in every layer, which finds
the running step in a thread-local variable, because not every family passes keywords through.
Queries of all sessions in the step come packed in one row, ``[1, heads, tokens, width]``.
"""

import threading
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from node.attention.block_table import AttendPages, BlockTable
from node.attention.decode_table import DecodeRows, attend_rows
from node.attention.mask_rules import CAUSAL, MaskRule, describe
from node.attention.segment import Segment
from node.device.scripted import scripted
from node.kv.layer_pool import LayerPool

ATTENTION_NAME = "anabranch_paged"

SCORES_BYTES_MAX = 64 << 20
"""Maximum bytes of float32 scores of one session's rows at once on an accelerator: several copies
are alive, beside the memory lent to weights and pages."""

SHARE_LEAST = 1e-3
"""Smallest norm used when comparing outputs, relative to values of size 1; smaller outputs are
compared as if they had this norm."""

WITHOUT_EFFECT = frozenset(
    {"position_ids", "cache_position", "position_embeddings", "deterministic", "use_cache"}
)
"""Keywords passed by layers that do not affect how attention is computed."""


@dataclass(slots=True, kw_only=True)
class Step:
    """State of the running step that the attention function needs."""

    pools: dict[int, LayerPool]
    """KV pools by layer index."""
    write_slots: torch.Tensor | slice
    """Pool rows of the step's new tokens, ``[tokens]``; a slice if they are consecutive."""
    segments: list[Segment]
    decode: DecodeRows | None = None
    """Set if every segment is one row; ``write_slots`` is a tensor then."""
    paged: BlockTable | None = None
    """Block table for ``attend_pages``, set together with it."""
    attend_pages: AttendPages | None = None
    compared: list[float] | None = None
    """If a list: layers return attention computed in float32, and each appends the error of
    ``attend_pages``, which is the largest norm of the difference over all rows and heads, relative
    to the norm of the float32 result."""
    calls: int = 0
    """Number of attention calls."""


class Weighing(NamedTuple):
    """How a layer weighs the keys of a context."""

    rule: MaskRule
    scale: float
    softcap: float | None
    sinks: torch.Tensor | None

    @property
    def needs_scores(self) -> bool:
        """Whether torch's kernels cannot do it."""
        return self.softcap is not None or self.sinks is not None


class LooksAhead(NotImplementedError):
    """Attention goes to later tokens: no cache can serve it, ours or another."""


class KvShapeFound(Exception):
    """Ends a trial run of a layer as soon as its attention is reached, with the KV shape found."""

    def __init__(self, layer: int, kv_heads: int, key_width: int, value_width: int) -> None:
        super().__init__(layer, kv_heads, key_width, value_width)
        self.layer = layer
        self.shape = (kv_heads, key_width, value_width)


class _Running(threading.local):
    step: Step | None = None
    looking: bool = False
    passing: bool = False
    passed: int = 0


_running = _Running()


def set_step(step: Step | None) -> None:
    """Set the step that this thread's next attention calls belong to."""
    _running.step = step


def set_looking(looking: bool) -> None:
    """While set, attention raises :class:`KvShapeFound` instead of computing."""
    _running.looking = looking


def set_passing(passing: bool) -> None:
    """While set, attention returns a tensor of the right shape and computes nothing; its calls
    are counted anew."""
    _running.passing = passing
    if passing:
        _running.passed = 0


def passed() -> int:
    """How often attention was called since :func:`set_passing` set it."""
    return _running.passed


def paged_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: MaskRule | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Write the new keys and values, and attend each session to its own context.

    ``query`` is ``[1, heads, tokens, width]``; ``key`` and ``value`` are ``[1, kv_heads, tokens,
    width]``, where values may have a width of their own. Returns ``[1, tokens, heads, width]``.
    Only the mask decides which keys a row sees; ``sliding_window`` repeats what the mask says.
    Raises NotImplementedError for what it cannot compute, so that the model is refused at load
    rather than wrong later.
    """
    rule = CAUSAL if attention_mask is None else attention_mask
    if _running.looking:
        _refuse_unknown(module, rule, is_causal, softcap, others)
        raise KvShapeFound(module.layer_idx, key.shape[1], key.shape[-1], value.shape[-1])
    if _running.passing:
        _running.passed += 1
        return query.new_empty(1, query.shape[2], query.shape[1], value.shape[-1]), None
    step = _running.step
    if step is None:
        raise RuntimeError("paged attention was called outside a step")
    step.calls += 1
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    pool, how = step.pools[module.layer_idx], Weighing(rule, scale, softcap, s_aux)
    by_pages = step.paged is not None and rule.predicate is None
    if by_pages and not _whole_prompt(step, how):
        pool.write(step.write_slots, key[0].transpose(0, 1), value[0].transpose(0, 1))
        return _in_place(query, pool, step, how), None
    if step.decode is not None and rule.predicate is None:
        assert isinstance(step.write_slots, torch.Tensor)  # noqa: S101 - a tensor in decode steps
        rows = (pool.keys, pool.values, step.write_slots, step.decode.spans, step.decode.table)
        # Scripted code may compile itself while it runs, which a CUDA graph cannot record.
        attend = scripted(attend_rows) if query.device.type == "cpu" else attend_rows
        attended: torch.Tensor = attend(
            query, key, value, *rows, s_aux, rule.window, float(scale), float(softcap or 0.0)
        )
        return attended, None
    pool.write(step.write_slots, key[0].transpose(0, 1), value[0].transpose(0, 1))
    return _session_by_session(query, pool, step, how), None


def _in_place(query: torch.Tensor, pool: LayerPool, step: Step, how: Weighing) -> torch.Tensor:
    """Attention by the kernel over pages, ``[1, rows, heads, value width]``."""
    assert step.attend_pages is not None and step.paged is not None  # noqa: S101, PT018 - together
    window, softcap = how.rule.window, how.softcap or 0.0
    attended = step.attend_pages(
        query, pool.keys, pool.values, step.paged, how.sinks, window, how.scale, softcap
    )
    if step.compared is None:
        return attended
    right = _in_float32(query, pool, step, how)
    apart = torch.linalg.vector_norm(attended.float() - right, dim=-1)
    # If nearly all weight goes to a sink, the rest may be below the dtype's resolution.
    least = SHARE_LEAST * right.shape[-1] ** 0.5
    whole = torch.linalg.vector_norm(right, dim=-1).clamp_min(least)
    step.compared.append(float((apart / whole).max()))
    return right.to(query.dtype)


def _in_float32(query: torch.Tensor, pool: LayerPool, step: Step, how: Weighing) -> torch.Tensor:
    """Attention in plain float32 torch, unrounded, ``[1, rows, heads, value width]``."""
    parts = [
        attend_openly(
            query[0, :, segment.first : segment.last].float(),
            pool.keys[segment.slots].float().permute(1, 2, 0),
            pool.values[segment.slots].float().transpose(0, 1),
            segment.mask(how.rule, query.device),
            how.scale,
            how.softcap,
            how.sinks,
        )
        for segment in step.segments
    ]
    return torch.cat(parts)[None]


def _whole_prompt(step: Step, how: Weighing) -> bool:
    """Whether the step is one session's first rows, all causal and in one run of pages; torch's own
    kernels are fastest for it."""
    if len(step.segments) != 1 or how.needs_scores:
        return False
    segment = step.segments[0]
    # ``slots`` does not tell: it is an empty slice if pages are not a run and a kernel reads them.
    whole = 1 < segment.rows == segment.context_tokens and segment.run
    return whole and not 0 < how.rule.window < segment.rows


def _session_by_session(
    query: torch.Tensor, pool: LayerPool, step: Step, how: Weighing
) -> torch.Tensor:
    """Attention by torch's kernels, session by session, ``[1, rows, heads, value width]``."""
    attend = _attend_explicitly if how.needs_scores else _attend
    parts = [attend(query, pool, segment, how) for segment in step.segments]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _refuse_unknown(
    module: Any, rule: Any, is_causal: bool | None, softcap: float | None, others: dict[str, Any]
) -> None:
    if not isinstance(rule, MaskRule):
        raise NotImplementedError("attention with a bias of its own")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if (rule is CAUSAL and not causal) or rule.looks_ahead:
        raise LooksAhead("attention to later tokens")
    if softcap is not None and not softcap > 0.0:  # 0 means none to kernels
        raise NotImplementedError(f"attention with scores capped at {softcap}")
    for name, given in others.items():
        if isinstance(given, torch.Tensor) and name not in WITHOUT_EFFECT:
            raise NotImplementedError(f"attention with {name}")


def _attend(query: torch.Tensor, pool: LayerPool, segment: Segment, how: Weighing) -> torch.Tensor:
    """Attention of one session's rows, ``[1, rows, heads, width]``."""
    keys = pool.keys[segment.slots].transpose(0, 1)[None]  # [1, kv_heads, context, width]
    values = pool.values[segment.slots].transpose(0, 1)[None]
    rule, rows, window = how.rule, segment.rows, how.rule.window
    heads, kv_heads = query.shape[1], keys.shape[1]
    part = query[:, :, segment.first : segment.last]
    if rows == 1 and rule.predicate is None:
        # A row sees all keys it is given, so the heads of a group can take the place of rows.
        if 0 < window < segment.context_tokens:
            keys, values = keys[:, :, -window:], values[:, :, -window:]
        grouped = part.reshape(1, kv_heads, heads // kv_heads, -1)
        out = F.scaled_dot_product_attention(grouped, keys, values, scale=how.scale)
        return out.reshape(1, 1, heads, -1)
    causal = rows == segment.context_tokens and not 0 < window < rows and rule.predicate is None
    if not causal and query.device.type != "cpu":
        allowed = segment.mask(rule, query.device)
        return attend_grouped(part, keys, values, allowed, how.scale, SCORES_BYTES_MAX)
    out = F.scaled_dot_product_attention(
        part,
        keys,
        values,
        attn_mask=None if causal else segment.mask(rule, query.device),
        is_causal=causal,
        scale=how.scale,
        enable_gqa=heads != kv_heads,
    )
    return out.transpose(1, 2)


def attend_grouped(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    allowed: torch.Tensor | None,
    scale: float,
    bytes_max: int,
) -> torch.Tensor:
    """Masked attention that is fast on accelerators, ``[1, rows, heads, value width]``.

    CUDA's kernels take a mask or groups of heads, not both: with both, torch repeats the keys and
    keeps all scores in float32. So the heads of a group become rows, in blocks whose scores take at
    most ``bytes_max``, in case torch keeps them. ``query`` is ``[1, heads, rows, width]``, ``keys``
    and ``values`` ``[1, kv_heads, context, width]``, ``allowed`` ``[rows, context]``.
    """
    heads, rows, kv_heads = query.shape[1], query.shape[2], keys.shape[1]
    group, parts = heads // kv_heads, []
    for first, last in _blocks(rows, 4 * heads * keys.shape[2], bytes_max):
        grouped = query[:, :, first:last].reshape(1, kv_heads, group * (last - first), -1)
        seen = None if allowed is None else allowed[first:last].repeat(group, 1)
        out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=seen, scale=scale)
        parts.append(out.reshape(1, heads, last - first, -1))
    return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)).transpose(1, 2)


def _blocks(rows: int, row_bytes: int, bytes_max: int) -> list[tuple[int, int]]:
    """The fewest blocks ``[first, last)`` within ``bytes_max`` each, of at least one row."""
    size = max(1, bytes_max // row_bytes)
    return [(first, min(rows, first + size)) for first in range(0, rows, size)]


def _attend_explicitly(
    query: torch.Tensor, pool: LayerPool, segment: Segment, how: Weighing
) -> torch.Tensor:
    """Like :func:`_attend`, but with explicit scores: soft-capped, or beside a sink per head.

    A sink is a score that takes its share of the softmax and adds no value ("Efficient Streaming
    Language Models with Attention Sinks", ICLR'24; here learned, ``[heads]``).
    """
    keys = pool.keys[segment.slots].permute(1, 2, 0)  # [kv_heads, width, context]
    values = pool.values[segment.slots].transpose(0, 1)  # [kv_heads, context, width]
    part = query[0, :, segment.first : segment.last]
    allowed = segment.mask(how.rule, query.device)
    if query.device.type == "cpu":
        weighed = attend_openly(part, keys, values, allowed, how.scale, how.softcap, how.sinks)
        return weighed[None]
    blocks = _blocks(segment.rows, 4 * part.shape[0] * keys.shape[2], SCORES_BYTES_MAX)
    parts = [
        attend_openly(
            part[:, first:last],
            keys,
            values,
            None if allowed is None else allowed[first:last],
            how.scale,
            how.softcap,
            how.sinks,
        )
        for first, last in blocks
    ]
    return (parts[0] if len(parts) == 1 else torch.cat(parts))[None]


def attend_openly(
    part: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    allowed: torch.Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention with explicit scores: ``[rows, heads, value width]`` from ``[heads, rows, width]``.

    See :func:`_attend_explicitly`. ``keys`` are ``[kv_heads, width, context]``, ``values``
    ``[kv_heads, context, width]``.
    """
    heads, rows, kv_heads = part.shape[0], part.shape[1], keys.shape[0]
    group = heads // kv_heads
    part = part.reshape(kv_heads, group * rows, -1)
    scores = torch.matmul(part, keys).view(kv_heads, group, rows, -1) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if allowed is not None:
        scores = scores.masked_fill(~allowed, float("-inf"))
    scores = scores.float()
    if sinks is not None:
        beside = sinks.float().view(kv_heads, group, 1, 1).expand(-1, -1, rows, -1)
        scores = torch.cat([scores, beside], dim=-1)
    shares = torch.softmax(scores, dim=-1).to(values.dtype)
    if sinks is not None:
        shares = shares[..., :-1]
    out = torch.matmul(shares.reshape(kv_heads, group * rows, -1), values)
    return out.view(heads, rows, -1).transpose(0, 1)


def register_attention() -> None:
    """Register the attention and mask functions with ``transformers`` as :data:`ATTENTION_NAME`."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(ATTENTION_NAME, paged_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, describe)
