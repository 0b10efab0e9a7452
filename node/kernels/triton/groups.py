# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Rows in blocks, each of one expert's, and tiles: what products by expert share. Imports
``triton``."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

LANES_LEAST = 16
SUMMED = 1024
"""Numbers of a result that a program sums up."""
PAIRS_AT_ONCE = 4096
"""(token, expert) pairs that a program looks at in one iteration to find its own expert's."""
FEW_ROWS = 16
"""Maximum mean number of rows per expert for which a block is as small as tensor cores allow."""
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

    def shared_bytes(self, item: int) -> int:
        """Shared memory for the tiles of both operands, numbers of ``item`` bytes each."""
        return (self.rows + self.outs) * self.ins * self.stages * item


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """(token, expert) pairs, ordered by expert; a pair's index counts pairs token by token."""

    order: Tensor
    """``[pairs]`` int32: index of the pair at each place."""
    ends: Tensor
    """``[experts]`` int32: end of each expert's places."""
    each: int
    """Experts per token."""


@triton.jit(do_not_specialize=["pairs"])
def _group_pairs(chosen, order, ends, pairs, PAIRS: tl.constexpr):
    """Find the places of one expert's pairs: behind all pairs of experts before it."""
    expert = tl.program_id(0)
    lanes = tl.arange(0, PAIRS)
    before = 0
    for first in range(0, pairs, PAIRS):
        given = tl.load(chosen + first + lanes, mask=first + lanes < pairs, other=2147483647)
        before += tl.sum((given < expert).to(tl.int32), 0)
    place = before
    for first in range(0, pairs, PAIRS):
        given = tl.load(chosen + first + lanes, mask=first + lanes < pairs, other=2147483647)
        own = (given == expert).to(tl.int32)
        tl.store(order + place + tl.cumsum(own, 0) - own, first + lanes, mask=own > 0)
        place += tl.sum(own, 0)
    tl.store(ends + expert, place)


@triton.jit
def own_block(ends, experts, block, EXPERTS: tl.constexpr, ROWS: tl.constexpr):
    """Find whose rows a block has: their expert, ``experts`` if there is no such block, the place
    of its first row, and where the expert's rows end."""
    lanes = tl.arange(0, EXPERTS)
    there = lanes < experts
    last = tl.load(ends + lanes, mask=there, other=0)
    first = tl.load(ends + lanes - 1, mask=there & (lanes > 0), other=0)
    counted = tl.cumsum(tl.cdiv(last - first, ROWS) * there.to(tl.int32), 0)
    before = there & (counted <= block)
    expert = tl.sum(before.to(tl.int32), 0)
    first_block = tl.max(tl.where(before, counted, 0), 0)
    first_row = tl.max(tl.where(before, last, 0), 0)
    end = tl.load(ends + expert, mask=expert < experts, other=0)
    return expert, first_row + (block - first_block) * ROWS, end


def blocks_most(pairs: int, experts: int, rows: int) -> int:
    """Maximum blocks of ``rows`` pairs of one expert, whatever the router chooses."""
    begun = min(experts, pairs)
    return (pairs + begun * (rows - 1)) // rows


def group(chosen: Tensor, experts: int) -> Groups:
    """Group the experts that a router chose, ``[tokens, each]`` int64, in one launch."""
    chosen = chosen.contiguous()
    pairs = chosen.numel()
    made = Groups(
        order=chosen.new_empty(pairs, dtype=torch.int32),
        ends=chosen.new_empty(experts, dtype=torch.int32),
        each=chosen.shape[1],
    )
    at_once = min(PAIRS_AT_ONCE, max(LANES_LEAST, triton.next_power_of_2(pairs)))
    with torch.cuda.device_of(chosen):
        _group_pairs[(experts,)](
            chosen, made.order, made.ends, pairs, PAIRS=at_once, num_warps=4 if pairs <= 1024 else 8
        )
    return made


@triton.jit
def _sum_each(made, out, width, EACH: tl.constexpr, LANES: tl.constexpr):
    """Sum up some columns of one token's products."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * LANES + tl.arange(0, LANES)
    inside = at < width
    total = tl.zeros([LANES], tl.float32)
    for nth in tl.static_range(EACH):
        part = tl.load(made + (token * EACH + nth) * width + at, mask=inside, other=0.0)
        total += part.to(tl.float32)
    tl.store(out + token * width + at, total.to(out.dtype.element_ty), mask=inside)


def sum_each(made: Tensor, each: int) -> Tensor:
    """Sums of the ``each`` products of every token, ``[tokens, width]``; ``made`` is ``[tokens *
    each, width]``, token by token."""
    pairs, width = made.shape
    out = made.new_empty(pairs // each, width)
    grid = (out.shape[0], triton.cdiv(width, SUMMED))
    with torch.cuda.device_of(made):
        _sum_each[grid](made.contiguous(), out, width, EACH=each, LANES=SUMMED, num_warps=4)
    return out
