# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Multiplies rows by packed matrices, one or those of a mixture's experts, as a Triton kernel.

What codes stand for is made in registers, between reading and multiplying, so that a matrix is read
in its own bits. Rows may belong to experts, as in :mod:`.triton_grouped_gemm`. Imports ``triton``.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from node.kernels.triton_groups import LANES_LEAST, Groups, own_block
from node.packed.packing import Packing, Parts

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes of rows; the last where the kernel is interpreted."""
COLUMNS_LEAST = 16
"""Minimum columns that share a scale."""
FEW_ROWS = 16
"""Maximum mean number of rows per matrix for which a block is as small as tensor cores allow."""
SOME_ROWS = 64
"""Likewise for blocks of 64 rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """Tile of a program: rows and columns of the output, and terms of the sum per iteration."""

    rows: int
    outs: int
    ins: int
    warps: int
    stages: int


FEW = Tiles(rows=16, outs=32, ins=256, warps=4, stages=3)
SOME = Tiles(rows=64, outs=64, ins=128, warps=4, stages=3)
MANY = Tiles(rows=128, outs=128, ins=64, warps=8, stages=3)
WRITTEN = Tiles(rows=0, outs=32, ins=256, warps=4, stages=1)
"""Tile that a program dequantises."""


def tiles_for(pairs: int, matrices: int) -> Tiles:
    """The quickest tiles for ``pairs`` of rows and matrices."""
    mean = pairs / matrices
    return FEW if mean <= FEW_ROWS else SOME if mean <= SOME_ROWS else MANY


def takes(packing: Packing, parts: Parts) -> bool:
    """Whether the kernel multiplies by it: not by matrices whose columns have several orders, nor
    by groups of columns that no tile holds whole."""
    ins, columns = packing.shape(parts)[-1], packing.columns
    power = columns >= COLUMNS_LEAST and columns & (columns - 1) == 0
    orders = parts["order"].shape[:-1].numel() if "order" in parts else 1
    return orders == 1 and (power or columns >= ins) and ins % 2 == 0


@triton.jit
def _numbers(
    read,
    scales,
    zeros,
    OUTS: tl.constexpr,
    INS: tl.constexpr,
    CODE: tl.constexpr,
    COLUMNS: tl.constexpr,
    EXPONENTS: tl.constexpr,
    ZEROS: tl.constexpr,
):
    """Make a tile of numbers, ``[OUTS, INS]`` float32, of its bytes and its groups' scales.

    Codes become bits of float32 without a conversion, which takes as long as several operations.
    """
    BITS: tl.constexpr = 4 if CODE == "uint4" or CODE == "offset4" or CODE == "e2m1" else 8
    wide = read.to(tl.int32)
    if BITS == 4:
        wide = tl.join(wide & 15, wide >> 4)
    wide = tl.reshape(wide, [OUTS, INS // COLUMNS, COLUMNS])
    if EXPONENTS:
        step = (scales.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    else:
        step = scales.to(tl.float32)
    if CODE == "e2m1" or CODE == "float8_e4m3" or CODE == "float8_e5m2":
        # Exponent and fraction at their places in a float32, whose bias is larger: two factors undo
        # it, as one beside a scale could be infinite.
        if CODE == "e2m1":
            bits = (wide & 7) << 22 | (wide & 8) << 28
            larger, step = 2.0**120, step * 2.0**6
        elif CODE == "float8_e4m3":
            bits = (wide & 127) << 20 | (wide & 128) << 24
            larger, step = 2.0**120, step
        else:
            bits = (wide & 127) << 21 | (wide & 128) << 24
            larger, step = 2.0**112, step
        made = bits.to(tl.float32, bitcast=True) * larger * step[:, :, None]
    else:
        # 1 + code / WHOLE, whose fraction is the code; a product and a sum make the rest of it.
        WHOLE: tl.constexpr = 1 << BITS
        if CODE == "int8":
            wide = wide ^ 128
        if ZEROS:
            zero = zeros.to(tl.float32)
        else:
            zero = 8.0 if CODE == "offset4" else 128.0 if CODE == "int8" else 0.0
        bits = wide << (23 - BITS) | 0x3F800000
        least = (zero + WHOLE) * step
        made = bits.to(tl.float32, bitcast=True) * (step * WHOLE)[:, :, None] - least[:, :, None]
    return tl.reshape(made, [OUTS, INS])


@triton.jit
def _packed_product(
    rows,
    codes,
    scales,
    zeros,
    factors,
    biases,
    shares,
    out,
    order,
    ends,
    experts,
    pairs,
    outs,
    ins,
    each,
    grid_rows,
    grid_columns,
    shared_rows,
    shared_columns,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTS: tl.constexpr,
    INS: tl.constexpr,
    CODE: tl.constexpr,
    PER_BYTE: tl.constexpr,
    COLUMNS: tl.constexpr,
    EXPONENTS: tl.constexpr,
    ZEROS: tl.constexpr,
    FACTORS: tl.constexpr,
    SPREAD: tl.constexpr,
    BIASED: tl.constexpr,
    SHARED: tl.constexpr,
):
    """Multiply a block of rows, of one expert if EXPERTS is not 0, by some of its columns.

    A tile's columns are groups of COLUMNS with one scale each; or one group, a part of
    ``shared_columns`` with one scale, if COLUMNS is INS.
    """
    block = tl.program_id(1)
    if EXPERTS:
        expert, first_place, end = own_block(ends, experts, block, EXPERTS, ROWS)
    else:
        expert, first_place, end = 0, block * ROWS, pairs
    if expert < experts:
        place = first_place + tl.arange(0, ROWS)
        live = place < end
        pair = place
        source = place
        if EXPERTS:
            pair = tl.load(order + place, mask=live, other=0)
            source = pair // each if SPREAD else place
        at = tl.arange(0, INS)
        from_rows = rows + source[:, None].to(tl.int64) * ins + at[None, :]
        matrix_row = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
        kept = matrix_row < outs
        nth = (expert * outs + matrix_row).to(tl.int64) * (ins // PER_BYTE)
        from_codes = codes + nth[:, None] + tl.arange(0, INS // PER_BYTE)[None, :]
        scale_row = expert.to(tl.int64) * grid_rows if EXPERTS else 0
        scale_row = (scale_row + matrix_row // shared_rows) * grid_columns
        groups = tl.arange(0, INS // COLUMNS)
        total = tl.zeros([OUTS, ROWS], tl.float32)
        from_grid = scale_row[:, None] + groups[None, :]
        inside = kept[:, None] & (groups < grid_columns)[None, :]
        step = tl.load(scales + from_grid, mask=inside, other=0)
        zero = step
        if ZEROS:
            zero = tl.load(zeros + from_grid, mask=inside, other=0)
        for done in range(0, ins, INS):
            # The next groups' scales are few bytes, which nothing brings ahead but this.
            group = (done + INS) // shared_columns + groups
            from_grid = scale_row[:, None] + group[None, :]
            inside = kept[:, None] & (group < grid_columns)[None, :]
            next_step = tl.load(scales + from_grid, mask=inside, other=0)
            next_zero = next_step
            if ZEROS:
                next_zero = tl.load(zeros + from_grid, mask=inside, other=0)
            left = ins - done
            some = tl.load(from_rows, mask=live[:, None] & (at < left)[None, :], other=0.0)
            held = (tl.arange(0, INS // PER_BYTE) * PER_BYTE < left)[None, :] & kept[:, None]
            read = tl.load(from_codes, mask=held, other=0)
            matrix = _numbers(read, step, zero, OUTS, INS, CODE, COLUMNS, EXPONENTS, ZEROS)
            matrix = matrix.to(some.dtype)
            total = tl.dot(matrix, tl.trans(some), total, input_precision="ieee")
            from_rows += INS
            from_codes += INS // PER_BYTE
            step, zero = next_step, next_zero
        made = tl.trans(total)
        column = expert.to(tl.int64) * outs + matrix_row if EXPERTS else matrix_row
        if FACTORS:
            made *= tl.load(factors + column, mask=kept, other=0.0).to(tl.float32)[None, :]
        if BIASED:
            made += tl.load(biases + column, mask=kept, other=0.0).to(tl.float32)[None, :]
        if SHARED:
            share = tl.load(shares + pair, mask=live, other=0.0)
            made *= share.to(tl.float32)[:, None]
        to = place if SPREAD else pair
        target = out + to[:, None].to(tl.int64) * outs + matrix_row[None, :]
        tl.store(target, made.to(out.dtype.element_ty), mask=live[:, None] & kept[None, :])


@triton.jit
def _dequantise(
    codes,
    scales,
    zeros,
    factors,
    out,
    outs,
    ins,
    grid_columns,
    shared_rows,
    shared_columns,
    OUTS: tl.constexpr,
    INS: tl.constexpr,
    CODE: tl.constexpr,
    PER_BYTE: tl.constexpr,
    COLUMNS: tl.constexpr,
    EXPONENTS: tl.constexpr,
    ZEROS: tl.constexpr,
    FACTORS: tl.constexpr,
):
    """Write the numbers of a tile."""
    row = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    kept = (row < outs)[:, None]
    done = tl.program_id(1) * INS
    byte = done // PER_BYTE + tl.arange(0, INS // PER_BYTE)
    nth = row[:, None].to(tl.int64) * (ins // PER_BYTE) + byte[None, :]
    read = tl.load(codes + nth, mask=kept & (byte * PER_BYTE < ins)[None, :], other=0)
    group = done // shared_columns + tl.arange(0, INS // COLUMNS)
    from_grid = (row // shared_rows)[:, None] * grid_columns + group[None, :]
    inside = kept & (group < grid_columns)[None, :]
    step = tl.load(scales + from_grid, mask=inside, other=0)
    zero = step
    if ZEROS:
        zero = tl.load(zeros + from_grid, mask=inside, other=0)
    made = _numbers(read, step, zero, OUTS, INS, CODE, COLUMNS, EXPONENTS, ZEROS)
    if FACTORS:
        made *= tl.load(factors + row, mask=row < outs, other=0.0).to(tl.float32)[:, None]
    at = done + tl.arange(0, INS)
    target = out + row[:, None].to(tl.int64) * ins + at[None, :]
    tl.store(target, made.to(out.dtype.element_ty), mask=kept & (at < ins)[None, :])


def dequantised(packing: Packing, parts: Parts, dtype: torch.dtype) -> Tensor:
    """The numbers of a packed matrix, ``[outs, ins]``, that :func:`takes` accepts, with its columns
    in their order as stored."""
    outs, ins = packing.shape(parts)
    scales = parts["scales"].contiguous()
    out = torch.empty(outs, ins, dtype=dtype, device=scales.device)
    whole = packing.columns >= WRITTEN.ins or packing.columns >= ins
    with torch.cuda.device_of(scales):
        _dequantise[(triton.cdiv(outs, WRITTEN.outs), triton.cdiv(ins, WRITTEN.ins))](
            parts["codes"].contiguous().view(torch.uint8),
            scales,
            parts["zeros"].contiguous() if "zeros" in parts else scales,
            parts["factors"].contiguous() if "factors" in parts else scales,
            out,
            outs,
            ins,
            scales.shape[-1],
            packing.rows,
            packing.columns,
            OUTS=WRITTEN.outs,
            INS=WRITTEN.ins,
            CODE=packing.code,
            PER_BYTE=8 // packing.bits,
            COLUMNS=WRITTEN.ins if whole else packing.columns,
            EXPONENTS=scales.dtype is torch.uint8,
            ZEROS="zeros" in parts,
            FACTORS="factors" in parts,
            num_warps=WRITTEN.warps,
        )
    return out


def packed_product(
    rows: Tensor,
    packing: Packing,
    parts: Parts,
    groups: Groups | None = None,
    *,
    spread: bool = False,
    bias: Tensor | None = None,
    shares: Tensor | None = None,
    tiles: Tiles | None = None,
) -> Tensor:
    """``rows``, ``[count, ins]``, times a packed matrix, ``[count, outs]``.

    With ``groups``, the matrices are ``[experts, outs, ins]``, and the rest is as in
    :func:`node.kernels.triton_grouped_gemm.grouped_product`. They are such as :func:`takes`
    accepts.
    """
    *leading, outs, ins = packing.shape(parts)
    experts = leading[0] if leading else 1
    if "order" in parts:
        place = parts["order"].reshape(-1).long()
        rows = torch.empty_like(rows).index_copy_(1, place, rows)
    rows = rows.contiguous()
    pairs = rows.shape[0] if groups is None else groups.order.shape[0]
    tiles = tiles or tiles_for(pairs, experts)
    whole = packing.columns >= tiles.ins or packing.columns >= ins
    out = rows.new_empty(pairs, outs)
    blocks = triton.cdiv(pairs, tiles.rows)
    if groups is not None:
        blocks = pairs // tiles.rows + min(experts, pairs)  # at most
    codes, scales = parts["codes"].contiguous(), parts["scales"].contiguous()
    grid = scales.shape[-2:]
    with torch.cuda.device_of(rows):  # Triton launches on the current device
        _packed_product[(triton.cdiv(outs, tiles.outs), blocks)](
            rows,
            codes.view(torch.uint8),
            scales,
            parts["zeros"].contiguous() if "zeros" in parts else scales,
            parts["factors"].contiguous() if "factors" in parts else scales,
            out if bias is None else bias.contiguous(),
            out if shares is None else shares.contiguous(),
            out,
            out if groups is None else groups.order,
            out if groups is None else groups.ends,
            experts,
            pairs,
            outs,
            ins,
            1 if groups is None else groups.each,
            grid[0],
            grid[1],
            packing.rows,
            packing.columns,
            EXPERTS=0 if groups is None else max(LANES_LEAST, triton.next_power_of_2(experts)),
            ROWS=tiles.rows,
            OUTS=tiles.outs,
            INS=tiles.ins,
            CODE=packing.code,
            PER_BYTE=8 // packing.bits,
            COLUMNS=tiles.ins if whole else packing.columns,
            EXPONENTS=scales.dtype is torch.uint8,
            ZEROS="zeros" in parts,
            FACTORS="factors" in parts,
            SPREAD=spread,
            BIASED=bias is not None,
            SHARED=shares is not None,
            num_warps=tiles.warps,
            num_stages=tiles.stages,
        )
    return out
