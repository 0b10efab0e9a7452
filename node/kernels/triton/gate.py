# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Gated activations as one Triton kernel, which reads gates and values where a merged product left
them: torch takes two to five launches, and its kernels are slow over such views. Imports
``triton``."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

NUMBERS_AT_ONCE = 1024


@triton.jit
def _gate_rows(
    gate,
    up,
    out,
    width,
    gate_row,
    gate_step,
    up_row,
    up_step,
    alpha,
    cubic,
    limit,
    shift,
    CUBIC: tl.constexpr,
    LIMITED: tl.constexpr,
    LANES: tl.constexpr,
):
    """Gate some numbers of one row."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * LANES + tl.arange(0, LANES)
    live = lane < width
    g = tl.load(gate + row * gate_row + lane * gate_step, mask=live, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_row + lane * up_step, mask=live, other=0.0).to(tl.float32)
    if LIMITED:  # by comparisons that NaN passes
        g = tl.where(g > limit, limit, g)
        u = tl.where(u > limit, limit, tl.where(u < -limit, -limit, u))
    inner = g
    if CUBIC:
        inner = g + cubic * g * g * g
    gated = g * tl.sigmoid(alpha * inner) * (u + shift)
    tl.store(out + row * width + lane, gated.to(out.dtype.element_ty), mask=live)


def gate_rows(
    gate: Tensor, up: Tensor, alpha: float, cubic: float, limit: float, shift: float
) -> Tensor:
    """``g · sigmoid(alpha · (g + cubic · g³)) · (u + shift)`` in float32, in the dtype of ``gate``.

    ``gate`` and ``up`` are ``[..., width]``, with any strides; ``g`` is a number of ``gate``, at
    most ``limit``, and ``u`` one of ``up``, within ``±limit``.
    """
    width = gate.shape[-1]
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    gates, ups = (part.reshape(-1, width) for part in (gate, up))
    with torch.cuda.device_of(gate):  # Triton launches on the current device
        _gate_rows[(gates.shape[0], triton.cdiv(width, NUMBERS_AT_ONCE))](
            gates,
            ups,
            out,
            width,
            gates.stride(0),
            gates.stride(1),
            ups.stride(0),
            ups.stride(1),
            alpha,
            cubic,
            limit,
            shift,
            CUBIC=cubic != 0,
            LIMITED=limit < math.inf,
            LANES=NUMBERS_AT_ONCE,
            num_warps=4,
        )
    return out
