# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Computes attention directly from the pages of the KV pool, as Triton kernels.

Rows of all sessions of a step, prefill and decode alike, go through one launch. A program takes a
block of one session's rows and all query heads that share a KV head, and reads that session's pages
once, with an online softmax (FlashAttention-2, ICLR'24, §3.1) over pages found by a table
(PagedAttention, SOSP'23, §4.1). If a step has too few blocks for the device, a context is split
over several programs and their parts are merged (Flash-Decoding).

Nothing is copied, and differences in sessions' lengths cost nothing: a step's cost depends on the
tokens that it attends to. Imports ``triton``, which CUDA builds of torch include on Linux.
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from node.attention.block_table import BlockTable, RowBlocks
from node.kernels.devices import processors, shared_bytes

SPLITS_MAX = 64
TILE_TOKENS = (16, 64)
"""Minimum and maximum context tokens per iteration of a program. A tensor core needs the minimum;
more than the maximum hides no more of the memory's latency."""
BLOCK_LANES = 64
"""Maximum rows times heads of a group per program of a prefill, unless one row has more; each
program reads the context once."""
LANES_LEAST = 16
"""Minimum size of a tensor core's product."""
LOADED_AT_ONCE = 8
"""Numbers of two bytes that a thread loads with one instruction."""
SHARED_SHARE_MAX = 0.75
PROGRAMS_PER_PROCESSOR = 4
"""Minimum programs per processor that splitting contexts aims at: some compute while others wait
for their pages. Their registers and shared memory fit a processor of compute capability 8.0 and
above."""
STAGES = 3
"""Pipeline stages of a tile: load its page numbers, load its keys and values, compute."""
WIDE_LANES = 64 * 128
"""Maximum rows times heads times numbers per head that fit the registers of four warps."""

_SIZES = ["splits", "window", "pages_wide", "query_token", "query_head"]
"""Arguments that may differ from step to step without compiling a kernel again."""


@triton.jit(do_not_specialize=_SIZES)
def _attend_block(
    query,
    keys,
    values,
    out,
    peaks,
    sums,
    sinks,
    pages,
    segments,
    blocks,
    query_token,
    query_head,
    key_row,
    key_head,
    value_row,
    value_head,
    pages_wide,
    splits,
    window,
    scale,
    softcap,
    QUERY_UNIT: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_LANES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    KEY_LANES: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    VALUE_LANES: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Attend some rows of a session, by one KV head's query heads, to a part of its context."""
    head = tl.program_id(1)
    part = tl.program_id(2)
    segment = tl.load(blocks + 2 * tl.program_id(0))
    offset = tl.load(blocks + 2 * tl.program_id(0) + 1)
    first = tl.load(segments + 3 * segment)
    count = tl.load(segments + 3 * segment + 1)
    context = tl.load(segments + 3 * segment + 2)

    lanes = tl.arange(0, GROUP_LANES * BLOCK_ROWS)
    member = lanes % GROUP_LANES
    row = offset + lanes // GROUP_LANES
    live = (row < count) & (member < GROUP)
    token = (first + row).to(tl.int64)
    at = context - count + row  # position in the session
    key_lanes = tl.arange(0, KEY_LANES)
    value_lanes = tl.arange(0, VALUE_LANES)
    asked = tl.load(
        query
        + (token[:, None] * query_token + (head * GROUP + member)[:, None] * query_head)
        * QUERY_UNIT
        + key_lanes[None, :],
        mask=live[:, None] & (key_lanes < KEY_WIDTH)[None, :],
        other=0.0,
    )

    # Tiles of context that any of the rows may see, and this program's share of the tiles.
    end = tl.minimum(context, context - count + offset + BLOCK_ROWS)
    begin = 0
    if WINDOWED:
        begin = tl.maximum(0, context - count + offset - window + 1)
    tile_first = begin // TILE
    tile_last = tl.cdiv(end, TILE)
    if SPLIT:
        share = tl.cdiv(tile_last - tile_first, splits)
        tile_first = tile_first + part * share
        tile_last = tl.minimum(tile_last, tile_first + share)

    peak = tl.full([GROUP_LANES * BLOCK_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_LANES * BLOCK_ROWS], tl.float32)
    gathered = tl.zeros([GROUP_LANES * BLOCK_ROWS, VALUE_LANES], tl.float32)
    for tile in range(tile_first, tile_last):
        column = tile * TILE + tl.arange(0, TILE)
        written = column < end
        page = tl.load(pages + segment * pages_wide + column // PAGE_TOKENS, mask=written, other=0)
        slot = page.to(tl.int64) * PAGE_TOKENS + column % PAGE_TOKENS
        key = tl.load(
            keys + slot[None, :] * key_row + head * key_head + key_lanes[:, None],
            mask=written[None, :] & (key_lanes < KEY_WIDTH)[:, None],
            other=0.0,
        )
        scores = tl.dot(asked, key, input_precision="ieee") * scale
        if CAPPED:
            scores = softcap * (1.0 - 2.0 / (tl.exp(2.0 * scores / softcap) + 1.0))
        seen = written[None, :] & (column[None, :] <= at[:, None])
        if WINDOWED:
            seen = seen & (column[None, :] > at[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # no key seen yet
        weights = tl.exp(scores - base[:, None])
        kept = tl.exp(peak - base)
        value = tl.load(
            values + slot[:, None] * value_row + head * value_head + value_lanes[None, :],
            mask=written[:, None] & (value_lanes < VALUE_WIDTH)[None, :],
            other=0.0,
        )
        total = total * kept + tl.sum(weights, 1)
        gathered = gathered * kept[:, None] + tl.dot(
            weights.to(value.dtype), value, input_precision="ieee"
        )
        peak = higher

    heads = tl.num_programs(1) * GROUP
    here = head * GROUP + member
    if SPLIT:
        at_part = (token * heads + here) * splits + part
        tl.store(peaks + at_part, peak, mask=live)
        tl.store(sums + at_part, total, mask=live)
        target = out + at_part[:, None] * VALUE_WIDTH + value_lanes[None, :]
        tl.store(target, gathered, mask=live[:, None] & (value_lanes < VALUE_WIDTH)[None, :])
    else:
        if SINKS:
            sink = tl.load(sinks + here, mask=member < GROUP, other=0.0).to(tl.float32)
            higher = tl.maximum(peak, sink)
            total = total * tl.exp(peak - higher) + tl.exp(sink - higher)
            gathered = gathered * tl.exp(peak - higher)[:, None]
        answer = gathered / tl.where(live, total, 1.0)[:, None]
        target = out + (token * heads + here)[:, None] * VALUE_WIDTH
        tl.store(
            target + value_lanes[None, :],
            answer.to(out.dtype.element_ty),
            mask=live[:, None] & (value_lanes < VALUE_WIDTH)[None, :],
        )


@triton.jit(do_not_specialize=["splits"])
def _merge_parts(
    parts,
    peaks,
    sums,
    sinks,
    tokens,
    out,
    splits,
    VALUE_WIDTH: tl.constexpr,
    VALUE_LANES: tl.constexpr,
    PARTS: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Merge the parts of the context of one row and query head, weighted by the parts' peaks."""
    token = tl.load(tokens + tl.program_id(0)).to(tl.int64)
    if token >= 0:  # a graph's list of rows has room for more
        head = tl.program_id(1)
        part = tl.arange(0, PARTS)
        there = part < splits
        row = token * tl.num_programs(1) + head
        each = row * splits + part
        peak = tl.load(peaks + each, mask=there, other=float("-inf"))
        highest = tl.max(peak, 0)
        if SINKS:
            sink = tl.load(sinks + head).to(tl.float32)
            highest = tl.maximum(highest, sink)
        weights = tl.exp(peak - highest)
        total = tl.sum(weights * tl.load(sums + each, mask=there, other=0.0), 0)
        if SINKS:
            total += tl.exp(sink - highest)
        lanes = tl.arange(0, VALUE_LANES)
        # A part without tokens wrote nothing, and is not read.
        found = tl.load(
            parts + each[:, None] * VALUE_WIDTH + lanes[None, :],
            mask=(weights > 0.0)[:, None] & (lanes < VALUE_WIDTH)[None, :],
            other=0.0,
        )
        answer = tl.sum(found * weights[:, None], 0) / total
        tl.store(
            out + row * VALUE_WIDTH + lanes,
            answer.to(out.dtype.element_ty),
            mask=lanes < VALUE_WIDTH,
        )


def tile_tokens(lanes: int, key_lanes: int, value_lanes: int, item: int, room_bytes: int) -> int:
    """Context tokens per tile, so that keys and values of two tiles fit beside the queries.

    ``item``: bytes per number; ``lanes``: rows times heads of a program.
    """
    least, most = TILE_TOKENS
    room = room_bytes * SHARED_SHARE_MAX - lanes * key_lanes * item
    tile = most
    while tile > least and 2 * tile * (key_lanes + value_lanes) * item > room:
        tile //= 2
    return tile


def query_unit(width: int) -> int:
    """Unit of a query's strides, in numbers; divides ``width``. It is a constant of the kernel,
    which therefore knows that it may load a whole unit at once."""
    return math.gcd(width, LOADED_AT_ONCE)


def splits_of(programs: int, wanted: int, tiles: int) -> int:
    """Number of parts of a context, a power of two, to get ``wanted`` programs in all.

    No part has less than two of the ``tiles`` that the longest context may have.
    """
    splits, most = 1, min(SPLITS_MAX, tiles // 2)
    while 2 * splits <= most and 2 * splits * programs <= wanted:
        splits *= 2
    return splits


def attend_pages(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: BlockTable,
    sinks: Tensor | None,
    window: int,
    scale: float,
    softcap: float,
) -> Tensor:
    """Attend each row to its session's pages; new keys and values must be written before.

    ``query`` is ``[1, heads, tokens, width]``; ``keys`` and ``values`` are pools ``[slots,
    kv_heads, width]``; ``sinks`` is ``[heads]``. ``window`` and ``softcap``: 0 means none. Returns
    ``[1, tokens, heads, value width]``.
    """
    unit = query_unit(query.shape[3])
    if query.stride(3) != 1 or query.stride(1) % unit or query.stride(2) % unit:
        query = query.contiguous()
    out = query.new_empty(1, query.shape[2], query.shape[1], values.shape[2])
    given = out if sinks is None else sinks.contiguous()
    group_lanes = triton.next_power_of_2(query.shape[1] // keys.shape[1])
    # Triton launches on the current device, even if its arguments are on another.
    with torch.cuda.device_of(query):
        for single in (True, False):  # rows alone in their session, and chunks
            block_rows = 1 if single else max(1, BLOCK_LANES // group_lanes)
            block = rows.blocks(block_rows, single=single)
            if block is not None:
                shape = _Shape.of(query, keys, values, group_lanes, block_rows)
                _attend(query, keys, values, rows, block, given, out, shape,
                        window, scale, softcap, sinks is not None)  # fmt: skip
    return out


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    """Sizes of a program."""

    group: int
    group_lanes: int
    block_rows: int
    key_lanes: int
    value_lanes: int
    tile: int

    @classmethod
    def of(
        cls, query: Tensor, keys: Tensor, values: Tensor, group_lanes: int, block_rows: int
    ) -> "_Shape":
        group_lanes = max(group_lanes, LANES_LEAST // block_rows)  # surplus lanes are masked
        key_lanes = max(LANES_LEAST, triton.next_power_of_2(keys.shape[2]))
        value_lanes = max(LANES_LEAST, triton.next_power_of_2(values.shape[2]))
        return cls(
            group=query.shape[1] // keys.shape[1],
            group_lanes=group_lanes,
            block_rows=block_rows,
            key_lanes=key_lanes,
            value_lanes=value_lanes,
            tile=tile_tokens(
                group_lanes * block_rows,
                key_lanes,
                value_lanes,
                keys.element_size(),
                shared_bytes(query.device),
            ),
        )

    @property
    def warps(self) -> int:
        wide = self.group_lanes * self.block_rows * max(self.key_lanes, self.value_lanes)
        return 4 if wide <= WIDE_LANES else 8


def _attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: BlockTable,
    block: RowBlocks,
    sinks: Tensor,
    out: Tensor,
    shape: _Shape,
    window: int,
    scale: float,
    softcap: float,
    has_sinks: bool,
) -> None:
    """Fill the rows of ``out`` that ``block`` names."""
    heads, tokens = query.shape[1:3]
    kv_heads, value_width = values.shape[1:]
    unit = query_unit(query.shape[3])
    programs = block.blocks.shape[0] * kv_heads
    wanted = PROGRAMS_PER_PROCESSOR * processors(query.device)
    # Context that a block sees at most; tokens before the window need no program.
    reach = min(rows.columns, window + shape.block_rows) if window else rows.columns
    splits = splits_of(programs, wanted, reach // shape.tile)
    parts, peaks, sums = out, out, out
    if splits > 1:
        parts = query.new_empty(tokens, heads, splits, value_width, dtype=torch.float32)
        peaks = query.new_empty(tokens, heads, splits, dtype=torch.float32)
        sums = torch.empty_like(peaks)
    _attend_block[(block.blocks.shape[0], kv_heads, splits)](
        query,
        keys,
        values,
        parts,
        peaks,
        sums,
        sinks,
        rows.pages,
        rows.segments,
        block.blocks,
        query.stride(2) // unit,
        query.stride(1) // unit,
        keys.stride(0),
        keys.stride(1),
        values.stride(0),
        values.stride(1),
        rows.pages.shape[1],
        splits,
        window,
        scale,
        softcap,
        QUERY_UNIT=unit,
        GROUP=shape.group,
        GROUP_LANES=shape.group_lanes,
        BLOCK_ROWS=shape.block_rows,
        KEY_WIDTH=keys.shape[2],
        KEY_LANES=shape.key_lanes,
        VALUE_WIDTH=value_width,
        VALUE_LANES=shape.value_lanes,
        PAGE_TOKENS=rows.page_tokens,
        TILE=shape.tile,
        SPLIT=splits > 1,
        WINDOWED=window > 0,
        CAPPED=softcap > 0.0,
        SINKS=has_sinks,
        num_warps=shape.warps,
        num_stages=STAGES,
    )
    if splits > 1:
        _merge_parts[(block.tokens.shape[0], heads)](
            parts,
            peaks,
            sums,
            sinks,
            block.tokens,
            out,
            splits,
            VALUE_WIDTH=value_width,
            VALUE_LANES=shape.value_lanes,
            PARTS=SPLITS_MAX,
            SINKS=has_sinks,
            num_warps=4,
        )
