# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Multiplies rows by packed matrices, one or those of a mixture's experts, as a Triton kernel.

What codes stand for is made in registers, between reading and multiplying, so that a matrix is read
in its own bits. Rows may belong to experts, as in :mod:`.grouped_gemm`. Imports ``triton``.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from node.kernels.devices import processors
from node.kernels.triton.groups import (
    FEW_ROWS,
    LANES_LEAST,
    SOME_ROWS,
    SUMMED,
    Groups,
    Tiles,
    blocks_most,
    own_block,
)
from node.kernels.triton.packed_row import FLOATS, WORDS_AT_ONCE, float_bits, row_product
from node.packed.packing import CENTRES, Packing, Parts

COLUMNS_LEAST = 16
"""Minimum columns that share a scale."""
WORD_BITS = 32
"""Fixed by int32: bits that are read at once of codes of 4 bits."""
EXPONENT_MAX = 128
"""Maximum of scales that are exponents of two, as bytes: 2."""
SCALE_MAX = 128.0
"""Maximum of floats that scale 8-bit floats: what undoes their bias is finite with it."""

ALONE = Tiles(rows=1, outs=8, ins=1024, warps=4, stages=1)
"""Tile for a row alone; what waits is hidden by the many programs that fit a processor."""
WORDS = (
    (
        Tiles(rows=16, outs=64, ins=128, warps=4, stages=3),
        Tiles(rows=16, outs=64, ins=64, warps=4, stages=5),
    ),
    (
        Tiles(rows=64, outs=64, ins=128, warps=4, stages=3),
        Tiles(rows=64, outs=64, ins=64, warps=4, stages=4),
    ),
    (Tiles(rows=128, outs=128, ins=64, warps=4, stages=3),),
)
"""Tiles for codes of 4 bits and few, some and many rows: the first that divides the columns."""
BYTES = (
    (Tiles(rows=16, outs=32, ins=256, warps=2, stages=3),),
    (Tiles(rows=64, outs=128, ins=64, warps=4, stages=3),),
    (Tiles(rows=128, outs=128, ins=64, warps=8, stages=3),),
)
"""Likewise for codes of 8 bits."""
DEQUANTISED_ROWS = 128
"""Maximum rows for which one matrix is multiplied by its bits; with more it takes less to write its
numbers first."""
DEQUANTISED_NUMBERS = 1 << 25
"""Numbers that are written at a time."""
ALIGNED = 128
"""Rows of which those are a multiple: cuBLAS has slower kernels for outputs that begin anywhere."""
PROGRAMS = 4
"""Programs that a processor is given at least, if sums are long enough to be split."""
SPLIT_TILES = 4
"""Minimum tiles in a part of a sum."""
WRITTEN = Tiles(rows=0, outs=32, ins=256, warps=4, stages=1)
"""Tile that a program dequantises."""


def tiles_for(pairs: int, matrices: int, packing: Packing, ins: int, *, alone: bool) -> Tiles:
    """The quickest tiles for ``pairs`` of rows and matrices of ``ins`` columns
    (``python -m bench.gpu.kernels --packed``); ``alone``: no matrix has two rows."""
    if alone:
        return ALONE
    mean = pairs / matrices
    size = 0 if mean <= FEW_ROWS else 1 if mean <= SOME_ROWS else 2
    known = (WORDS if packing.bits == 4 else BYTES)[size]
    return next((each for each in known if ins % each.ins == 0), known[-1])


def splits_for(programs: int, ins: int, tiles: Tiles, device: torch.device) -> int:
    """Parts of each sum of ``ins`` terms, so that ``programs`` times as many occupy a device."""
    wanted = PROGRAMS * processors(device) // programs
    return max(1, min(wanted, ins // (SPLIT_TILES * tiles.ins)))


def takes(packing: Packing, parts: Parts) -> bool:
    """Whether the kernel multiplies by it: not by codes that it does not know, by matrices whose
    columns have several orders, by groups of columns that no tile holds whole, nor where a scale is
    too large."""
    if packing.code not in FLOATS and packing.code not in CENTRES:
        return False
    ins, columns = packing.shape(parts)[-1], packing.columns
    power = columns >= COLUMNS_LEAST and columns & (columns - 1) == 0
    orders = parts["order"].shape[:-1].numel() if "order" in parts else 1
    if orders > 1 or not (power or columns >= ins) or ins * packing.bits % WORD_BITS:
        return False
    scales = parts["scales"]
    if scales.device.type == "meta":
        return True
    if scales.dtype is torch.uint8:
        return int(scales.max()) <= EXPONENT_MAX
    return not packing.code.startswith("float8") or float(scales.abs().max()) <= SCALE_MAX


@triton.jit
def _numbers(
    codes,
    scales,
    zeros,
    one,
    OUTS: tl.constexpr,
    INS: tl.constexpr,
    CODE: tl.constexpr,
    HELD: tl.constexpr,
    COLUMNS: tl.constexpr,
    EXPONENTS: tl.constexpr,
    ZEROS: tl.constexpr,
    TURNED: tl.constexpr,
):
    """Make a tile of numbers, ``[OUTS, INS]`` float32, of its codes, which are bytes or words of
    eight, and its groups' scales.

    If TURNED, columns of words are in the order of :func:`_turned`.
    """
    FLOATS: tl.constexpr = CODE == "e2m1" or CODE == "float8_e4m3" or CODE == "float8_e5m2"
    if HELD == 1:
        bits = float_bits(codes.to(tl.int32), one, 0, CODE)
    else:
        lower = tl.join(
            tl.join(float_bits(codes, one, 0, CODE), float_bits(codes, one, 1, CODE)),
            tl.join(float_bits(codes, one, 2, CODE), float_bits(codes, one, 3, CODE)),
        )
        upper = tl.join(
            tl.join(float_bits(codes, one, 4, CODE), float_bits(codes, one, 5, CODE)),
            tl.join(float_bits(codes, one, 6, CODE), float_bits(codes, one, 7, CODE)),
        )
        bits = tl.reshape(tl.join(lower, upper), [OUTS, INS // 32, 4, 2, 2, 2])
        bits = tl.permute(bits, [0, 1, 5, 4, 2, 3] if TURNED else [0, 1, 2, 5, 4, 3])
    made = bits.to(tl.float32, bitcast=True)
    if EXPONENTS and CODE == "e2m1":
        step = (scales.to(tl.int32) + 126 << 23).to(tl.float32, bitcast=True)
    elif EXPONENTS:
        step = (scales.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    else:
        step = scales.to(tl.float32)
    if CODE == "e2m1" and not EXPONENTS:  # all that undoes the bias would be infinite in a scale
        made *= 2.0**120
        step *= 2.0**6
    elif CODE == "float8_e4m3":
        step *= 2.0**120
    elif CODE == "float8_e5m2":
        step *= 2.0**112
    least = step
    if not FLOATS:
        WHOLE: tl.constexpr = 16 if HELD == 8 else 256
        if ZEROS:
            zero = zeros.to(tl.float32)
        else:
            zero = 8.0 if CODE == "offset4" else 128.0 if CODE == "int8" else 0.0
        least = (zero + WHOLE) * step
        step *= WHOLE
    if TURNED and COLUMNS == 16:  # both groups of 32 columns lie among each other
        made = tl.reshape(made, [OUTS, INS // 32, 4, 2, 4])
        step = tl.reshape(step, [OUTS, INS // 32, 1, 2, 1])
        least = tl.reshape(least, [OUTS, INS // 32, 1, 2, 1])
    else:
        made = tl.reshape(made, [OUTS, INS // COLUMNS, COLUMNS])
        step = tl.reshape(step, [OUTS, INS // COLUMNS, 1])
        least = tl.reshape(least, [OUTS, INS // COLUMNS, 1])
    made *= step
    if not FLOATS:
        made -= least
    return tl.reshape(made, [OUTS, INS])


@triton.jit
def _turned(rows, ROWS: tl.constexpr, INS: tl.constexpr):
    """Put each 32 columns into the order in which threads multiply: a thread then multiplies by all
    eight numbers of the words that it reads, instead of handing six of them to others.

    Its part of a product of 16 columns are two neighbours, and two that are 8 columns on
    (``mma.m16n8k16``).
    """
    apart = tl.reshape(rows, [ROWS, INS // 32, 4, 2, 2, 2])
    return tl.reshape(tl.permute(apart, [0, 1, 3, 4, 2, 5]), [ROWS, INS])


@triton.jit(do_not_specialize=["pairs"])  # else some row counts would wait for the compiler
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
    one,
    per_split,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTS: tl.constexpr,
    INS: tl.constexpr,
    WHOLE: tl.constexpr,
    SPLIT: tl.constexpr,
    CODE: tl.constexpr,
    HELD: tl.constexpr,
    COLUMNS: tl.constexpr,
    EXPONENTS: tl.constexpr,
    ZEROS: tl.constexpr,
    TURNED: tl.constexpr,
    FACTORS: tl.constexpr,
    SPREAD: tl.constexpr,
    BIASED: tl.constexpr,
    SHARED: tl.constexpr,
):
    """Multiply a block of rows, of one expert if EXPERTS is not 0, by some of its columns.

    If WHOLE, tiles end where the matrix does. A tile's columns are groups of COLUMNS with one scale
    each; or one group, a part of ``shared_columns`` with one scale, if COLUMNS is INS.
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
        start, stop = 0, ins
        if SPLIT:
            start = tl.program_id(2) * per_split
            stop = tl.minimum(start + per_split, ins)
        at = tl.arange(0, INS)
        word = tl.arange(0, INS // HELD)
        from_rows = rows + source[:, None].to(tl.int64) * ins + start + at[None, :]
        matrix_row = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
        kept = matrix_row < outs
        nth = (expert * outs + matrix_row).to(tl.int64) * (ins // HELD)
        from_codes = codes + nth[:, None] + start // HELD + word[None, :]
        scale_row = expert.to(tl.int64) * grid_rows if EXPERTS else 0
        scale_row = (scale_row + matrix_row // shared_rows) * grid_columns
        groups = tl.arange(0, INS // COLUMNS)
        total = tl.zeros([OUTS, ROWS], tl.float32)
        group = start // shared_columns + groups
        from_grid = scale_row[:, None] + group[None, :]
        inside = kept[:, None] & (group < grid_columns)[None, :]
        step = tl.load(scales + from_grid, mask=inside, other=0)
        zero = step
        if ZEROS:
            zero = tl.load(zeros + from_grid, mask=inside, other=0)
        for done in range(start, stop, INS):
            # The next groups' scales are few bytes, which nothing brings ahead but this.
            group = (done + INS) // shared_columns + groups
            from_grid = scale_row[:, None] + group[None, :]
            inside = kept[:, None] & (group < grid_columns)[None, :]
            next_step = tl.load(scales + from_grid, mask=inside, other=0)
            next_zero = next_step
            if ZEROS:
                next_zero = tl.load(zeros + from_grid, mask=inside, other=0)
            if WHOLE:
                some = tl.load(from_rows, mask=live[:, None], other=0.0)
                read = tl.load(from_codes)
            else:
                left = stop - done
                some = tl.load(from_rows, mask=live[:, None] & (at < left)[None, :], other=0.0)
                held = (word * HELD < left)[None, :] & kept[:, None]
                read = tl.load(from_codes, mask=held, other=0)
            matrix = _numbers(
                read, step, zero, one, OUTS, INS, CODE, HELD, COLUMNS, EXPONENTS, ZEROS, TURNED
            )
            matrix = matrix.to(some.dtype)
            if TURNED:
                some = _turned(some, ROWS, INS)
            total = tl.dot(matrix, tl.trans(some), total, input_precision="ieee")
            from_rows += INS
            from_codes += INS // HELD
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
        if SPLIT:
            target += tl.program_id(2).to(tl.int64) * pairs * outs
        tl.store(target, made.to(out.dtype.element_ty), mask=live[:, None] & kept[None, :])


@triton.jit(do_not_specialize=["count"])
def _sum_parts(
    parts, biases, out, outs, numbers, count, BIASED: tl.constexpr, AT_ONCE: tl.constexpr
):
    """Sum up the products by parts of a matrix's columns."""
    at = tl.program_id(0) * AT_ONCE + tl.arange(0, AT_ONCE)
    kept = at < numbers
    total = tl.zeros([AT_ONCE], tl.float32)
    for _ in range(count):
        total += tl.load(parts + at, mask=kept, other=0.0)
        parts += numbers
    if BIASED:
        total += tl.load(biases + at % outs, mask=kept, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=kept)


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
    one,
    OUTS: tl.constexpr,
    INS: tl.constexpr,
    CODE: tl.constexpr,
    HELD: tl.constexpr,
    COLUMNS: tl.constexpr,
    EXPONENTS: tl.constexpr,
    ZEROS: tl.constexpr,
    FACTORS: tl.constexpr,
):
    """Write the numbers of a tile."""
    row = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    kept = (row < outs)[:, None]
    done = tl.program_id(1) * INS
    word = done // HELD + tl.arange(0, INS // HELD)
    nth = row[:, None].to(tl.int64) * (ins // HELD) + word[None, :]
    read = tl.load(codes + nth, mask=kept & (word * HELD < ins)[None, :], other=0)
    group = done // shared_columns + tl.arange(0, INS // COLUMNS)
    from_grid = (row // shared_rows)[:, None] * grid_columns + group[None, :]
    inside = kept & (group < grid_columns)[None, :]
    step = tl.load(scales + from_grid, mask=inside, other=0)
    zero = step
    if ZEROS:
        zero = tl.load(zeros + from_grid, mask=inside, other=0)
    made = _numbers(read, step, zero, one, OUTS, INS, CODE, HELD, COLUMNS, EXPONENTS, ZEROS, False)
    if FACTORS:
        made *= tl.load(factors + row, mask=row < outs, other=0.0).to(tl.float32)[:, None]
    at = done + tl.arange(0, INS)
    target = out + row[:, None].to(tl.int64) * ins + at[None, :]
    tl.store(target, made.to(out.dtype.element_ty), mask=kept & (at < ins)[None, :])


def dequantised(packing: Packing, parts: Parts, dtype: torch.dtype) -> Tensor:
    """The numbers of a packed matrix, ``[outs, ins]``, that :func:`takes` accepts, its columns in
    the order that they are stored in."""
    outs, ins = packing.shape(parts)
    out = torch.empty(outs, ins, dtype=dtype, device=parts["codes"].device)
    given, named = _operands(packing, parts, WRITTEN)
    with torch.cuda.device_of(out):  # Triton launches on the current device
        _dequantise[(triton.cdiv(outs, WRITTEN.outs), triton.cdiv(ins, WRITTEN.ins))](
            *given,
            out,
            outs,
            ins,
            parts["scales"].shape[-1],
            packing.rows,
            packing.columns,
            _one(packing),
            num_warps=WRITTEN.warps,
            **named,
        )
    return out


def _operands(
    packing: Packing, parts: Parts, tiles: Tiles
) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """What kernels are told of a matrix: its tensors, and what they are compiled for."""
    scales = parts["scales"].contiguous()
    ins = packing.shape(parts)[-1]
    one_group = packing.columns >= tiles.ins or packing.columns >= ins
    codes = parts["codes"].contiguous()
    by_words = packing.bits == 4 or tiles.rows == 1
    held = WORD_BITS // packing.bits if by_words else 1
    tensors = (
        codes.view(torch.int32 if held > 1 else torch.uint8),
        scales,
        parts["zeros"].contiguous() if "zeros" in parts else scales,
        parts["factors"].contiguous() if "factors" in parts else scales,
    )
    return tensors, {
        "OUTS": tiles.outs,
        "INS": tiles.ins,
        "CODE": packing.code,
        "HELD": held,
        "COLUMNS": tiles.ins if one_group else packing.columns,
        "EXPONENTS": scales.dtype is torch.uint8,
        "ZEROS": "zeros" in parts,
        "FACTORS": "factors" in parts,
    }


def _product_of_numbers(
    rows: Tensor, packing: Packing, parts: Parts, bias: Tensor | None
) -> Tensor:
    """The product by a matrix's numbers, of which a part is written at a time."""
    outs, ins = packing.shape(parts)
    out = rows.new_empty(rows.shape[0], outs)
    stored = {name: part for name, part in parts.items() if name != "order"}
    together = math.lcm(packing.rows, ALIGNED)
    each = max(1, DEQUANTISED_NUMBERS // (ins * together)) * together
    for start in range(0, outs, each):
        end = min(start + each, outs)
        numbers = dequantised(packing, packing.some_rows(stored, start, end), rows.dtype)
        torch.mm(rows, numbers.t(), out=out[:, start:end])
    return out if bias is None else out.add_(bias)


def _one(packing: Packing) -> int:
    """The bits of 1 in float32, perhaps with a code's sign turned; an argument, because the
    compiler makes one operation of a mask and what is in a register."""
    return 0x3F800000 ^ (0x400000 if packing.code == "int8" else 0)


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
    splits: int | None = None,
) -> Tensor:
    """``rows``, ``[count, ins]``, times a packed matrix, ``[count, outs]``.

    With ``groups``, the matrices are ``[experts, outs, ins]``, and the rest is as in
    :func:`node.kernels.triton.grouped_gemm.grouped_product`. They are such as :func:`takes`
    accepts. ``tiles`` and ``splits``, the parts of the sum that are made side by side, are chosen
    here where they are None.
    """
    *leading, outs, ins = packing.shape(parts)
    experts = leading[0] if leading else 1
    if "order" in parts:
        place = parts["order"].reshape(-1).long()
        rows = torch.empty_like(rows).index_copy_(1, place, rows)
    rows = rows.contiguous()
    pairs = rows.shape[0] if groups is None else groups.order.shape[0]
    if groups is None and tiles is None and pairs > DEQUANTISED_ROWS:
        return _product_of_numbers(rows, packing, parts, bias)
    alone = pairs == (1 if groups is None else groups.each)
    tiles = tiles or tiles_for(pairs, experts, packing, ins, alone=alone)
    blocks = triton.cdiv(pairs, tiles.rows)
    if groups is not None:
        blocks = blocks_most(pairs, experts, tiles.rows)
    grid = (triton.cdiv(outs, tiles.outs), blocks)
    if splits is None:
        splits = 1 if groups is not None else splits_for(grid[0] * grid[1], ins, tiles, rows.device)
    per_split = triton.cdiv(triton.cdiv(ins, tiles.ins), splits) * tiles.ins
    out = rows.new_empty(pairs, outs)
    made = out if splits == 1 else torch.empty(splits, pairs, outs, device=rows.device)
    given, named = _operands(packing, parts, tiles)
    bias = None if bias is None else bias.contiguous()
    if tiles.rows == 1:
        product = row_product
        at_once = WORDS_AT_ONCE if ins % (WORDS_AT_ONCE * named["HELD"]) == 0 else 1
        named |= {"VECTOR": at_once}
    else:
        product = _packed_product
        named |= {"ROWS": tiles.rows, "TURNED": packing.bits == 4}
    with torch.cuda.device_of(rows):  # Triton launches on the current device
        product[(*grid, splits)](
            rows,
            *given,
            out if bias is None else bias,
            out if shares is None else shares.contiguous(),
            made,
            out if groups is None else groups.order,
            out if groups is None else groups.ends,
            experts,
            pairs,
            outs,
            ins,
            1 if groups is None else groups.each,
            *parts["scales"].shape[-2:],
            packing.rows,
            packing.columns,
            _one(packing),
            per_split,
            EXPERTS=0 if groups is None else max(LANES_LEAST, triton.next_power_of_2(experts)),
            WHOLE=ins % tiles.ins == 0 and outs % tiles.outs == 0,
            SPLIT=splits > 1,
            SPREAD=spread,
            BIASED=bias is not None and splits == 1,
            SHARED=shares is not None,
            num_warps=tiles.warps,
            num_stages=tiles.stages,
            **named,
        )
        if splits > 1:
            _sum_parts[(triton.cdiv(out.numel(), SUMMED),)](
                made,
                out if bias is None else bias,
                out,
                outs,
                out.numel(),
                splits,
                BIASED=bias is not None,
                AT_ONCE=SUMMED,
                num_warps=4,
            )
    return out
