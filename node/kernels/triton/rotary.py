# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Rotary position embedding (RoFormer, arXiv:2104.09864) of queries and keys as one Triton kernel:
models' own code takes ten launches. Imports ``triton``."""

import torch
import triton
import triton.language as tl
from torch import Tensor

HEADS_AT_ONCE = 8


@triton.jit
def _rotate_part(part, out, head, heads, held, token, token_stride, head_stride, lane, inside,
                 cos_1, sin_1, cos_2, sin_2, HALF: tl.constexpr):  # fmt: skip
    """Rotate the heads of one token that are ``held``, of the ``heads`` that ``part`` has."""
    mask = held[:, None] & inside[None, :]
    source = part + token * token_stride + head[:, None] * head_stride + lane[None, :]
    first = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=mask, other=0.0).to(tl.float32)
    target = out + (token * heads + head[:, None]) * (2 * HALF) + lane[None, :]
    rotated = first * cos_1[None, :] - second * sin_1[None, :]
    tl.store(target, rotated.to(out.dtype.element_ty), mask=mask)
    rotated = second * cos_2[None, :] + first * sin_2[None, :]
    tl.store(target + HALF, rotated.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _rotate_heads(
    query,
    key,
    cos,
    sin,
    query_out,
    key_out,
    heads,
    kv_heads,
    query_token,
    query_head,
    key_token,
    key_head,
    cos_token,
    sin_token,
    SECOND: tl.constexpr,
    HALF: tl.constexpr,
    LANES: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Rotate some heads of one token; key heads are counted behind query heads."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    lane = tl.arange(0, LANES)
    inside = lane < HALF
    cos_1 = tl.load(cos + token * cos_token + lane, mask=inside, other=0.0).to(tl.float32)
    sin_1 = tl.load(sin + token * sin_token + lane, mask=inside, other=0.0).to(tl.float32)
    cos_2 = tl.load(cos + token * cos_token + SECOND + lane, mask=inside, other=0.0)
    sin_2 = tl.load(sin + token * sin_token + SECOND + lane, mask=inside, other=0.0)
    cos_2, sin_2 = cos_2.to(tl.float32), sin_2.to(tl.float32)

    _rotate_part(query, query_out, head, heads, head < heads, token, query_token, query_head,
                 lane, inside, cos_1, sin_1, cos_2, sin_2, HALF)  # fmt: skip
    kv_head = head - heads
    held = (kv_head >= 0) & (kv_head < kv_heads)
    _rotate_part(key, key_out, kv_head, kv_heads, held, token, key_token, key_head,
                 lane, inside, cos_1, sin_1, cos_2, sin_2, HALF)  # fmt: skip


def rotate_heads(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys, each number of a head's first half rotated with that of its second.

    ``query`` is ``[1, heads, tokens, width]``, ``key`` ``[1, kv_heads, tokens, width]``; ``cos``
    and ``sin`` are ``[1, tokens, width]``, or ``[1, tokens, width / 2]`` where both halves have the
    same. Computes in float32.
    """
    _, heads, tokens, width = query.shape
    kv_heads, half = key.shape[1], width // 2
    parts = [part if part.stride(-1) == 1 else part.contiguous() for part in (query, key, cos, sin)]
    query, key, cos, sin = parts
    query_out = query.new_empty(1, tokens, heads, width)
    key_out = key.new_empty(1, tokens, kv_heads, width)
    with torch.cuda.device_of(query):  # Triton launches on the current device
        _rotate_heads[(tokens, triton.cdiv(heads + kv_heads, HEADS_AT_ONCE))](
            query,
            key,
            cos,
            sin,
            query_out,
            key_out,
            heads,
            kv_heads,
            query.stride(2),
            query.stride(1),
            key.stride(2),
            key.stride(1),
            cos.stride(1),
            sin.stride(1),
            SECOND=cos.shape[2] - half,
            HALF=half,
            LANES=triton.next_power_of_2(half),
            HEADS=HEADS_AT_ONCE,
            num_warps=4,
        )
    return query_out.transpose(1, 2), key_out.transpose(1, 2)
