# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Writes a step's keys and values to their rows of the pool in one launch. Imports ``triton``."""

import torch
import triton
import triton.language as tl
from torch import Tensor

NUMBERS_AT_ONCE = 1024


@triton.jit
def _write_part(part, pool, token, slot, lane, token_stride, head_stride, row, WIDTH: tl.constexpr):
    """Write some numbers of one token's row, which has ``row`` numbers in heads of WIDTH."""
    inside = lane < row
    source = part + token * token_stride + lane // WIDTH * head_stride + lane % WIDTH
    made = tl.load(source, mask=inside, other=0.0)
    tl.store(pool + slot * row + lane, made.to(pool.dtype.element_ty), mask=inside)


@triton.jit
def _write_rows(
    key,
    value,
    keys,
    values,
    slots,
    key_token,
    key_head,
    value_token,
    value_head,
    key_row,
    value_row,
    KEY_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    LANES: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    lane = tl.program_id(1) * LANES + tl.arange(0, LANES)
    _write_part(key, keys, token, slot, lane, key_token, key_head, key_row, KEY_WIDTH)
    _write_part(value, values, token, slot, lane, value_token, value_head, value_row, VALUE_WIDTH)


def write_rows(keys: Tensor, values: Tensor, slots: Tensor, key: Tensor, value: Tensor) -> None:
    """Write ``key`` and ``value``, ``[tokens, kv_heads, width]``, to the rows ``slots`` of the
    pools ``keys`` and ``values``, ``[rows, kv_heads, width]``. Widths may differ."""
    key, value = (part if part.stride(2) == 1 else part.contiguous() for part in (key, value))
    key_row, value_row = keys[0].numel(), values[0].numel()
    blocks = triton.cdiv(max(key_row, value_row), NUMBERS_AT_ONCE)
    with torch.cuda.device_of(keys):  # Triton launches on the current device
        _write_rows[(slots.shape[0], blocks)](
            key,
            value,
            keys,
            values,
            slots,
            key.stride(0),
            key.stride(1),
            value.stride(0),
            value.stride(1),
            key_row,
            value_row,
            KEY_WIDTH=keys.shape[2],
            VALUE_WIDTH=values.shape[2],
            LANES=NUMBERS_AT_ONCE,
            num_warps=4,
        )
