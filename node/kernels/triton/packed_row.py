# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, attr-defined"
"""Multiplies rows that are alone with their packed matrix, number by number, as a Triton kernel.

Units that multiply matrices would be given 15 rows of zeros, and every number in another thread's
order. Here a thread reads four words of codes at once and sums up its own terms; scales and zero
points are applied to sums instead of numbers. Imports ``triton``.
"""

import triton
import triton.language as tl

from node.kernels.triton.groups import own_block

WORDS_AT_ONCE = 4
"""Words that a thread reads with one instruction."""
FLOATS = frozenset({"e2m1", "float8_e4m3", "float8_e5m2"})
"""Codes that are floats of few bits (:func:`float_bits`); the others are steps of one size."""
RAISED = tl.constexpr(64)
"""Exponent of what rows are multiplied by where codes are floats: these are made so small that
their products with small numbers would be rounded. Half of theirs, so that rows of any size that
models have neither overflow nor vanish."""


@triton.jit
def _moved(words, LEFT: tl.constexpr):
    """Shift words to the left, or to the right where LEFT is negative."""
    return words << LEFT if LEFT >= 0 else words >> -LEFT


@triton.jit
def float_bits(words, one, NTH: tl.constexpr, CODE: tl.constexpr):
    """Make of the code at place NTH of words the bits of a float32, without a conversion, which
    takes as long as several operations.

    Of a float they are the same float where its exponent's bias is 127. Of steps of one size they
    are 1 plus the code over 16 or 256: the code is the fraction.
    """
    if CODE == "e2m1":  # the sign is kept in the place that it is first shifted to
        made = words << 28 - 4 * NTH >> 6 & (7 << 22 | -2147483648)
    elif CODE == "float8_e4m3":
        made = words << 24 - 8 * NTH >> 4 & (127 << 20 | -2147483648)
    elif CODE == "float8_e5m2":
        made = words << 24 - 8 * NTH >> 3 & (127 << 21 | -2147483648)
    elif CODE == "int8" or CODE == "uint8":
        made = _moved(words, 15 - 8 * NTH) & (255 << 15) ^ one
    else:
        made = _moved(words, 19 - 4 * NTH) & (15 << 19) ^ one
    return made


@triton.jit
def _times(codes, row, one, NTH: tl.constexpr, CODE: tl.constexpr):
    return float_bits(codes, one, NTH, CODE).to(tl.float32, bitcast=True) * row


@triton.jit
def _four_terms(codes, row_0, row_1, row_2, row_3, one, FIRST: tl.constexpr, CODE: tl.constexpr):
    """Sum up a word's products with four numbers of a row.

    Returns the sum as :func:`float_bits` makes numbers, what is in it beyond the codes', and the
    sum of the row's numbers. One shift serves two codes of 4 bits: the lower one is 1 plus itself
    over 256.
    """
    if CODE == "uint4" or CODE == "offset4":
        pair = _moved(codes, 15 - 4 * FIRST)
        other = _moved(codes, 7 - 4 * FIRST)
        lower = (pair & (15 << 15) ^ one).to(tl.float32, bitcast=True) * row_0
        upper = (pair & (15 << 19) ^ one).to(tl.float32, bitcast=True) * row_1
        lower += (other & (15 << 15) ^ one).to(tl.float32, bitcast=True) * row_2
        upper += (other & (15 << 19) ^ one).to(tl.float32, bitcast=True) * row_3
        made = 16.0 * lower + upper
        beyond = 16.0 * (row_0 + row_2) + (row_1 + row_3)
    else:
        made = _times(codes, row_0, one, FIRST, CODE) + _times(codes, row_1, one, FIRST + 1, CODE)
        made += _times(codes, row_2, one, FIRST + 2, CODE)
        made += _times(codes, row_3, one, FIRST + 3, CODE)
        beyond = row_0 + row_1 + row_2 + row_3
    return made, beyond, row_0 + row_1 + row_2 + row_3


@triton.jit
def _terms(codes, row, one, WORDS: tl.constexpr, HELD: tl.constexpr, CODE: tl.constexpr):
    """Sum up the products of each word's HELD codes with a row, as :func:`_four_terms` does."""
    if HELD == 4:
        row_02, row_13 = tl.split(tl.reshape(row, [1, WORDS, 2, 2]))
        row_0, row_2 = tl.split(row_02)
        row_1, row_3 = tl.split(row_13)
        made, beyond, whole = _four_terms(codes, row_0, row_1, row_2, row_3, one, 0, CODE)
    else:
        even, odd = tl.split(tl.reshape(row, [1, WORDS, 2, 2, 2]))
        row_04, row_26 = tl.split(even)
        row_15, row_37 = tl.split(odd)
        row_0, row_4 = tl.split(row_04)
        row_2, row_6 = tl.split(row_26)
        row_1, row_5 = tl.split(row_15)
        row_3, row_7 = tl.split(row_37)
        made, beyond, whole = _four_terms(codes, row_0, row_1, row_2, row_3, one, 0, CODE)
        made_4, beyond_4, whole_4 = _four_terms(codes, row_4, row_5, row_6, row_7, one, 4, CODE)
        made, beyond, whole = made + made_4, beyond + beyond_4, whole + whole_4
    return made, beyond, whole


@triton.jit
def _factor(scales, CODE: tl.constexpr, EXPONENTS: tl.constexpr):
    """Make what sums are multiplied by of their groups' scales."""
    LEFT: tl.constexpr = (
        126 - RAISED if CODE == "e2m1"
        else 120 - RAISED if CODE == "float8_e4m3"
        else 112 - RAISED if CODE == "float8_e5m2"
        else 0
    )  # fmt: skip
    if EXPONENTS:
        made = (scales.to(tl.int32) + LEFT << 23).to(tl.float32, bitcast=True)
    else:
        made = scales.to(tl.float32) * 2.0**LEFT
    return made


@triton.jit(do_not_specialize=["pairs"])  # else some row counts would wait for the compiler
def row_product(
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
    OUTS: tl.constexpr,
    INS: tl.constexpr,
    WHOLE: tl.constexpr,
    SPLIT: tl.constexpr,
    CODE: tl.constexpr,
    HELD: tl.constexpr,
    VECTOR: tl.constexpr,
    COLUMNS: tl.constexpr,
    EXPONENTS: tl.constexpr,
    ZEROS: tl.constexpr,
    FACTORS: tl.constexpr,
    SPREAD: tl.constexpr,
    BIASED: tl.constexpr,
    SHARED: tl.constexpr,
):
    """Multiply one row, or one of each expert that has any if EXPERTS is not 0, by some columns.

    Words hold HELD codes, and a thread reads VECTOR words at once. The rest is as in
    :func:`node.kernels.triton.packed._packed_product`.
    """
    FLOATS: tl.constexpr = CODE == "e2m1" or CODE == "float8_e4m3" or CODE == "float8_e5m2"
    WORDS: tl.constexpr = INS // HELD
    SUMMED: tl.constexpr = VECTOR if VECTOR * HELD < COLUMNS else COLUMNS // HELD
    SUMS: tl.constexpr = WORDS // SUMMED
    expert, place = 0, tl.program_id(1)
    pair, source = place, place
    if EXPERTS:
        expert, place, _ = own_block(ends, experts, tl.program_id(1), EXPERTS, 1)
        pair = tl.load(order + place, mask=expert < experts, other=0)
        source = pair // each if SPREAD else place
    if expert < experts:
        start, stop = 0, ins
        if SPLIT:
            start = tl.program_id(2) * per_split
            stop = tl.minimum(start + per_split, ins)
        at = tl.arange(0, INS)[None, :]
        word = tl.arange(0, WORDS)[None, :]
        vector = word // VECTOR * (VECTOR * HELD)
        matrix_row = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
        kept = matrix_row < outs
        from_row = rows + source.to(tl.int64) * ins + at
        nth = matrix_row.to(tl.int64)
        if EXPERTS:
            nth += expert.to(tl.int64) * outs
        if not WHOLE:  # rows beyond the last read some row
            nth = tl.where(kept, nth, 0)
        from_codes = codes + (nth * (ins // (VECTOR * HELD)) * VECTOR)[:, None] + word
        scale_row = expert.to(tl.int64) * grid_rows if EXPERTS else 0
        scale_row = ((scale_row + matrix_row // shared_rows) * grid_columns)[:, None]
        of_tile = tl.arange(0, SUMS)[None, :] * (SUMMED * HELD) // COLUMNS
        total = tl.zeros([OUTS, SUMS], tl.float32)
        for done in range(start, stop, INS):
            if WHOLE:
                row = tl.load(from_row + done)
                read = tl.load(from_codes + done // HELD)
            else:
                row = tl.load(from_row + done, mask=at < stop - done, other=0.0)
                read = tl.load(from_codes + done // HELD, mask=vector < stop - done, other=0)
            group = done // shared_columns + of_tile
            inside = kept[:, None] & (group < grid_columns)
            step = tl.load(scales + scale_row + group, mask=inside, other=0)
            zero = step
            if ZEROS:
                zero = tl.load(zeros + scale_row + group, mask=inside, other=0)
            row = row.to(tl.float32)
            if FLOATS:
                row *= 2.0**RAISED
            made, beyond, whole = _terms(read, row, one, WORDS, HELD, CODE)
            made = tl.sum(tl.reshape(made, [OUTS, SUMS, SUMMED]), 2)
            if not FLOATS:
                beyond = tl.sum(tl.reshape(beyond, [1, SUMS, SUMMED]), 2)
                whole = tl.sum(tl.reshape(whole, [1, SUMS, SUMMED]), 2)
                made = (16.0 if HELD == 8 else 256.0) * (made - beyond)
                if ZEROS:
                    made -= zero.to(tl.float32) * whole
                elif CODE == "offset4":
                    made -= 8.0 * whole
                elif CODE == "int8":
                    made -= 128.0 * whole
            total += made * _factor(step, CODE, EXPONENTS)
        made = tl.sum(total, 1)
        column = matrix_row
        if EXPERTS:
            column = expert.to(tl.int64) * outs + matrix_row
        if FACTORS:
            made *= tl.load(factors + column, mask=kept, other=0.0).to(tl.float32)
        if BIASED:
            made += tl.load(biases + column, mask=kept, other=0.0).to(tl.float32)
        if SHARED:
            made *= tl.load(shares + pair).to(tl.float32)
        target = out + (place if SPREAD else pair).to(tl.int64) * outs + matrix_row
        if SPLIT:
            target += tl.program_id(2).to(tl.int64) * pairs * outs
        tl.store(target, made.to(out.dtype.element_ty), mask=kept)
