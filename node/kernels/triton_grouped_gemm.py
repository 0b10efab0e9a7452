# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Multiplies rows by the matrix of the expert that each was sent to, as a Triton kernel.

On some data-centre GPUs torch multiplies by groups in one launch. On others it reads on the CPU
where groups end, so every mixture of experts waits for the device and no CUDA graph can record it.
Here each program finds its own group: rows are ordered by expert and cut into blocks, and a block's
expert is found in the running count of blocks (as in MegaBlocks, MLSys'23, §5.1). Only matrices of
experts that have rows are read. Imports ``triton``.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

LANES_LEAST = 16
FEW_ROWS = 16
"""Maximum mean number of rows per expert for which a block is as small as tensor cores allow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """Tile of a program: rows and columns of the output, and terms of the sum per iteration."""

    rows: int
    outs: int
    ins: int
    warps: int
    stages: int


FEW = Tiles(rows=16, outs=32, ins=128, warps=4, stages=3)
"""Tiles for decodes: reading the weights dominates, and many programs share it."""
MANY = Tiles(rows=64, outs=128, ins=32, warps=4, stages=3)
"""Tiles for prefills: weights that were read are reused often."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """(token, expert) pairs, ordered by expert."""

    tokens: Tensor
    """``[pairs]`` int32: the token of each pair."""
    ends: Tensor
    """``[experts]`` int32: end of each expert's pairs."""
    block_ends: Tensor
    """``[experts]`` int32: end of each expert's blocks."""
    blocks: int
    """Upper bound on the number of blocks, whatever the router chooses."""
    tiles: Tiles


@triton.jit
def _grouped_product(
    rows,
    weights,
    biases,
    out,
    sources,
    ends,
    block_ends,
    experts,
    outs,
    ins,
    row_stride,
    expert_stride,
    out_stride,
    in_stride,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTS: tl.constexpr,
    INS: tl.constexpr,
    GATHERED: tl.constexpr,
    BIASED: tl.constexpr,
):
    """Multiply a block of one expert's rows by some of its columns."""
    block = tl.program_id(1)
    lanes = tl.arange(0, EXPERTS)
    there = lanes < experts
    counted = tl.load(block_ends + lanes, mask=there, other=2147483647)
    before = counted <= block
    expert = tl.sum(before.to(tl.int32), 0)
    if expert < experts:
        last = tl.load(ends + lanes, mask=there, other=0)
        first_block = tl.max(tl.where(before, counted, 0), 0)
        first_row = tl.max(tl.where(before, last, 0), 0)
        end = tl.load(ends + expert)
        row = first_row + (block - first_block) * ROWS + tl.arange(0, ROWS)
        live = row < end
        source = row
        if GATHERED:
            source = tl.load(sources + row, mask=live, other=0)
        source = source.to(tl.int64)
        column = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
        kept = column < outs
        at = tl.arange(0, INS)
        from_rows = rows + source[:, None] * row_stride + at[None, :]
        from_weights = (
            weights
            + expert.to(tl.int64) * expert_stride
            + column[None, :].to(tl.int64) * out_stride
            + at[:, None] * in_stride
        )
        total = tl.zeros([ROWS, OUTS], tl.float32)
        for done in range(0, ins, INS):
            left = at < ins - done
            some = tl.load(from_rows, mask=live[:, None] & left[None, :], other=0.0)
            matrix = tl.load(from_weights, mask=left[:, None] & kept[None, :], other=0.0)
            total = tl.dot(some, matrix, total, input_precision="ieee")
            from_rows += INS
            from_weights += INS * in_stride
        if BIASED:
            bias = tl.load(biases + expert.to(tl.int64) * outs + column, mask=kept, other=0.0)
            total += bias.to(tl.float32)[None, :]
        target = out + row[:, None].to(tl.int64) * outs + column[None, :]
        tl.store(target, total.to(out.dtype.element_ty), mask=live[:, None] & kept[None, :])


def group(chosen: Tensor, experts: int) -> tuple[Groups, Tensor]:
    """Group the experts that a router chose, ``[tokens, each]`` int64, without a device wait.

    Returns the groups, and the order ``[pairs]``: the index of the pair at each place, counting
    pairs token by token.
    """
    tokens, each = chosen.shape
    pairs = tokens * each
    tiles = FEW if pairs <= FEW_ROWS * experts else MANY
    sent, order = torch.sort(chosen.reshape(-1), stable=True)
    ends = torch.searchsorted(
        sent, torch.arange(experts, device=chosen.device), right=True, out_int32=True
    )
    counts = torch.diff(ends, prepend=ends.new_zeros(1))
    blocks = torch.div(counts + (tiles.rows - 1), tiles.rows, rounding_mode="floor")
    made = Groups(
        tokens=torch.div(order, each, rounding_mode="floor").to(torch.int32),
        ends=ends,
        block_ends=torch.cumsum(blocks, 0, dtype=torch.int32),
        blocks=pairs // tiles.rows + min(experts, pairs),
        tiles=tiles,
    )
    return made, order


def grouped_product(
    rows: Tensor,
    weights: Tensor,
    bias: Tensor | None,
    groups: Groups,
    *,
    gathered: bool,
    transposed: bool,
) -> Tensor:
    """Product of each pair's row with its expert's matrix, ``[pairs, outs]``.

    ``weights`` are ``[experts, outs, ins]``, or ``[experts, ins, outs]`` if ``transposed``;
    ``bias`` is ``[experts, outs]``. If ``gathered``, ``rows`` are ``[tokens, ins]`` and each pair
    takes its token's row; otherwise they are ``[pairs, ins]`` in the groups' order.
    """
    experts = weights.shape[0]
    outs, ins = weights.shape[1:]
    strides = weights.stride()
    out_stride, in_stride = strides[1], strides[2]
    if transposed:
        outs, ins, out_stride, in_stride = ins, outs, in_stride, out_stride
    rows = rows.contiguous()
    tiles, pairs = groups.tiles, groups.tokens.shape[0]
    out = rows.new_empty(pairs, outs)
    grid = (triton.cdiv(outs, tiles.outs), groups.blocks)
    # Triton launches on the current device, even if its arguments are on another.
    with torch.cuda.device_of(rows):
        _grouped_product[grid](
            rows,
            weights,
            out if bias is None else bias.contiguous(),
            out,
            groups.tokens,
            groups.ends,
            groups.block_ends,
            experts,
            outs,
            ins,
            ins,
            strides[0],
            out_stride,
            in_stride,
            EXPERTS=max(LANES_LEAST, triton.next_power_of_2(experts)),
            ROWS=tiles.rows,
            OUTS=tiles.outs,
            INS=tiles.ins,
            GATHERED=gathered,
            BIASED=bias is not None,
            num_warps=tiles.warps,
            num_stages=tiles.stages,
        )
    return out
