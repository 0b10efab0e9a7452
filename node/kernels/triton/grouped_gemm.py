# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Multiplies rows by the matrix of the expert that each was sent to, as a Triton kernel.

On most GPUs torch reads on the CPU where groups end, so every mixture of experts waits for the
device and no CUDA graph can record it; on some data-centre GPUs it multiplies by groups in one
launch, more slowly than this. Here each program finds its own group: rows are ordered by expert and
cut into blocks, and a block's expert is found in the running count of blocks (as in MegaBlocks,
MLSys'23, §5.1). Only matrices of experts that have rows are read. Imports ``triton``.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from node.kernels.devices import shared_bytes
from node.kernels.triton.groups import (
    FEW_ROWS,
    LANES_LEAST,
    SOME_ROWS,
    Groups,
    Tiles,
    blocks_most,
    group,
    own_block,
    sum_each,
)
from node.kernels.triton.packed import packed_product
from node.packed.tensor import PackedTensor

__all__ = ["SOME_ROWS", "group", "grouped_product", "sum_each"]

FEW = (
    Tiles(rows=16, outs=64, ins=128, warps=4, stages=3),
    Tiles(rows=16, outs=32, ins=128, warps=4, stages=3),
)
"""Tiles for decodes, the first that fits: reading the weights dominates, and many programs share
it. ``bench gpu.kernels`` times these and others."""
SOME = (
    Tiles(rows=64, outs=128, ins=64, warps=4, stages=3),
    Tiles(rows=64, outs=128, ins=32, warps=4, stages=3),
)
"""Tiles for short prefills."""
MANY = (Tiles(rows=128, outs=256, ins=64, warps=8, stages=3), *SOME)
"""Tiles for prefills: weights that were read are reused often."""


def tiles_for(pairs: int, experts: int, item: int, room_bytes: int) -> Tiles:
    """The quickest tiles for ``pairs`` of tokens and experts that fit in ``room_bytes`` of shared
    memory, numbers of ``item`` bytes each; the last known where none does."""
    mean = pairs / experts
    known = FEW if mean <= FEW_ROWS else SOME if mean <= SOME_ROWS else MANY
    return next((each for each in known if each.shared_bytes(item) <= room_bytes), known[-1])


@triton.jit
def _grouped_product(
    rows,
    weights,
    biases,
    shares,
    out,
    order,
    ends,
    experts,
    outs,
    ins,
    each,
    row_stride,
    expert_stride,
    out_stride,
    in_stride,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTS: tl.constexpr,
    INS: tl.constexpr,
    SPREAD: tl.constexpr,
    BIASED: tl.constexpr,
    SHARED: tl.constexpr,
):
    """Multiply a block of one expert's rows by some of its columns."""
    block = tl.program_id(1)
    expert, first_place, end = own_block(ends, experts, block, EXPERTS, ROWS)
    if expert < experts:
        place = first_place + tl.arange(0, ROWS)
        live = place < end
        pair = tl.load(order + place, mask=live, other=0)
        source = pair // each if SPREAD else place
        column = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
        kept = column < outs
        at = tl.arange(0, INS)
        from_rows = rows + source[:, None].to(tl.int64) * row_stride + at[None, :]
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
        if SHARED:
            share = tl.load(shares + pair, mask=live, other=0.0)
            total *= share.to(tl.float32)[:, None]
        to = place if SPREAD else pair
        target = out + to[:, None].to(tl.int64) * outs + column[None, :]
        tl.store(target, total.to(out.dtype.element_ty), mask=live[:, None] & kept[None, :])


def grouped_product(
    rows: Tensor,
    weights: Tensor,
    bias: Tensor | None,
    groups: Groups,
    *,
    spread: bool,
    transposed: bool,
    shares: Tensor | None = None,
) -> Tensor:
    """Product of each pair's row with its expert's matrix, ``[pairs, outs]``.

    ``weights`` are ``[experts, outs, ins]``, or ``[experts, ins, outs]`` if ``transposed``,
    perhaps packed;
    ``bias`` is ``[experts, outs]``. If ``spread``, ``rows`` are tokens' ``[tokens, ins]``, and the
    products lie in the groups' order. Otherwise ``rows`` are ``[pairs, ins]`` in that order, and
    the products lie token by token. ``shares``, ``[pairs]`` token by token, multiply the products.
    """
    if isinstance(weights, PackedTensor):
        packing: Any = weights.packing  # the general one: nothing multiplies by others
        return packed_product(
            rows, packing, weights.parts, groups, spread=spread, bias=bias, shares=shares
        )
    experts = weights.shape[0]
    outs, ins = weights.shape[1:]
    strides = weights.stride()
    out_stride, in_stride = strides[1], strides[2]
    if transposed:
        outs, ins, out_stride, in_stride = ins, outs, in_stride, out_stride
    rows = rows.contiguous()
    pairs = groups.order.shape[0]
    tiles = tiles_for(pairs, experts, weights.element_size(), shared_bytes(rows.device))
    out = rows.new_empty(pairs, outs)
    blocks = blocks_most(pairs, experts, tiles.rows)
    # Triton launches on the current device, even if its arguments are on another.
    with torch.cuda.device_of(rows):
        _grouped_product[(triton.cdiv(outs, tiles.outs), blocks)](
            rows,
            weights,
            out if bias is None else bias.contiguous(),
            out if shares is None else shares.contiguous(),
            out,
            groups.order,
            groups.ends,
            experts,
            outs,
            ins,
            groups.each,
            ins,
            strides[0],
            out_stride,
            in_stride,
            EXPERTS=max(LANES_LEAST, triton.next_power_of_2(experts)),
            ROWS=tiles.rows,
            OUTS=tiles.outs,
            INS=tiles.ins,
            SPREAD=spread,
            BIASED=bias is not None,
            SHARED=shares is not None,
            num_warps=tiles.warps,
            num_stages=tiles.stages,
        )
    return out
