# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""RMS norms as a Triton kernel: for single rows torch's takes twice as long. Imports ``triton``."""

import torch
import triton
import triton.language as tl
from torch import Tensor

NUMBERS_AT_ONCE = 2048
"""Numbers that a program takes at least, unless all rows have fewer."""


@triton.jit
def _norm_rows(
    rows,
    scale,
    out,
    inner,
    outer_stride,
    inner_stride,
    count,
    eps,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Norm some rows; row ``n`` is row ``n % inner`` of the outer row ``n // inner``."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, LANES)
    live = (row < count)[:, None] & (lane < WIDTH)[None, :]
    at = (row // inner).to(tl.int64) * outer_stride + (row % inner) * inner_stride
    x = tl.load(rows + at[:, None] + lane[None, :], mask=live, other=0.0).to(tl.float32)
    w = tl.load(scale + lane, mask=lane < WIDTH, other=0.0).to(tl.float32)
    normed = x * tl.rsqrt(tl.sum(x * x, 1) / WIDTH + eps)[:, None] * w[None, :]
    target = out + row[:, None].to(tl.int64) * WIDTH + lane[None, :]
    tl.store(target, normed.to(out.dtype.element_ty), mask=live)


def norm_rows(rows: Tensor, scale: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x²) + eps) · scale`` of each row ``x``, in float32, in the dtype of ``rows``.

    ``rows`` are ``[..., width]``, ``scale`` is ``[width]``.
    """
    width = rows.shape[-1]
    flat = rows.flatten(0, -3) if rows.dim() > 2 else rows[None]
    if flat.stride(2) != 1:
        flat = flat.contiguous()
    out = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
    count, lanes = flat.shape[0] * flat.shape[1], triton.next_power_of_2(width)
    at_once = min(max(1, NUMBERS_AT_ONCE // lanes), triton.next_power_of_2(max(1, count)))
    with torch.cuda.device_of(rows):  # Triton launches on the current device
        _norm_rows[(triton.cdiv(count, at_once),)](
            flat,
            scale,
            out,
            flat.shape[1],
            flat.stride(0),
            flat.stride(1),
            count,
            eps,
            WIDTH=width,
            LANES=lanes,
            ROWS=at_once,
            num_warps=min(16, max(4, at_once * lanes // 512)),
        )
    return out
