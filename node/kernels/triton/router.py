# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Choice of experts from the logits of a router as one Triton kernel: models' own code takes up to
ten launches. Imports ``triton``."""

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS_AT_ONCE = 4


@triton.jit(do_not_specialize=["count"])  # else some row counts would wait for the compiler
def _choose_experts(
    logits,
    biases,
    scores_out,
    chosen_out,
    count,
    experts,
    factor,
    TOP: tl.constexpr,
    TOP_LANES: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
    SOFTMAX: tl.constexpr,
    NORMALISED: tl.constexpr,
    BIASED: tl.constexpr,
):
    """Choose experts for some rows. Of equals the first is chosen; a number that is none is the
    smallest, so that all chosen exist and differ."""
    least = -3.0e38
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    lane = tl.arange(0, LANES)
    real = (lane < experts)[None, :]
    live = (row < count)[:, None] & real
    at = row[:, None] * experts + lane[None, :]
    x = tl.load(logits + at, mask=live, other=0.0).to(tl.float32)
    if SOFTMAX:
        peak = tl.max(tl.where(real, x, float("-inf")), 1)
        weight = tl.where(real, tl.exp(x - peak[:, None]), 0.0)
        whole = tl.sum(weight, 1)[:, None]
    else:
        weight = tl.sigmoid(x)
        whole = tl.full((ROWS, 1), 1.0, tl.float32)
    if BIASED:
        bias = tl.load(biases + lane, mask=lane < experts, other=0.0).to(tl.float32)
        x = weight / whole + bias[None, :]
    x = tl.where(real, tl.where(x > least, x, least), float("-inf"))

    slot = tl.arange(0, TOP_LANES)[None, :]
    chosen = tl.zeros((ROWS, TOP_LANES), tl.int32)
    scores = tl.zeros((ROWS, TOP_LANES), tl.float32)
    for place in range(TOP):
        highest = tl.max(x, 1)[:, None]
        best = tl.min(tl.where(x == highest, lane[None, :], LANES), 1)[:, None]
        taken = lane[None, :] == best
        score = tl.sum(tl.where(taken, weight, 0.0), 1)[:, None]
        chosen = tl.where(slot == place, best, chosen)
        scores = tl.where(slot == place, score, scores)
        x = tl.where(taken, float("-inf"), x)
    if NORMALISED:
        whole = tl.sum(scores, 1)[:, None]
    scores = scores / whole * factor
    target = row[:, None] * TOP + slot
    kept = (row < count)[:, None] & (slot < TOP)
    tl.store(scores_out + target, scores.to(scores_out.dtype.element_ty), mask=kept)
    tl.store(chosen_out + target, chosen.to(tl.int64), mask=kept)


def choose_experts(
    logits: Tensor,
    biases: Tensor | None,
    top: int,
    dtype: torch.dtype,
    *,
    softmax: bool,
    normalised: bool,
    factor: float,
) -> tuple[Tensor, Tensor]:
    """Scores, in ``dtype``, and indices of each row's ``top`` experts, ``[tokens, top]``, the
    highest first.

    ``logits`` are ``[tokens, experts]``. Scores are softmax or sigmoid of the logits, divided by
    their sum if ``normalised``, times ``factor``. ``biases``, ``[experts]``, are added to scores
    only to choose. Computes in float32.
    """
    logits = logits.contiguous()
    count, experts = logits.shape
    scores = torch.empty(count, top, dtype=dtype, device=logits.device)
    chosen = torch.empty(count, top, dtype=torch.int64, device=logits.device)
    with torch.cuda.device_of(logits):  # Triton launches on the current device
        _choose_experts[(triton.cdiv(count, ROWS_AT_ONCE),)](
            logits,
            logits if biases is None else biases,
            scores,
            chosen,
            count,
            experts,
            factor,
            TOP=top,
            TOP_LANES=triton.next_power_of_2(top),
            LANES=triton.next_power_of_2(experts),
            ROWS=ROWS_AT_ONCE,
            SOFTMAX=softmax,
            NORMALISED=normalised,
            BIASED=biases is not None,
            num_warps=4,
        )
    return scores, chosen
