"""Weights in the layout that a device multiplies without dequantising them first.

On GPUs a kernel of ours multiplies by the general layout (:class:`.packing.Packing`); blocks of
GGUF files are brought into it, codes of 5 to 8 bits as bytes, scales rounded to bfloat16.

On CPUs torch has one such product, of bfloat16 rows by 4-bit codes with a scale and an offset for
each group of columns (``_weight_int4pack_mm_for_cpu``). Whatever has numbers in steps of one size
by groups (:class:`.packing.Affine`) becomes its operand: codes of 4 bits as they are, codes of 5
to 8 bits as two columns of 4, of which the first is multiplied by 16 times the row's number. Only
scales and offsets are rounded, to bfloat16. Rows beyond a few are cheaper to multiply dequantised.
"""

import functools
import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from dht.errors import first_line
from node.packed.packing import Affine, Meaning, Packing, Parts, Room, random_bytes
from node.packed.tensor import PackedTensor

logger = logging.getLogger(__name__)

GROUPS = (256, 128, 64, 32)
"""Columns that may share a scale in torch's product."""
ROWS_TOGETHER = (64, 32)
"""Rows whose codes are interleaved, with AVX-512 and with AVX2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperandConfig:
    """Which weights are multiplied as operands, and how exactly."""

    row_bits_max: int = 512
    """Maximum rows that are multiplied by the bits, times the bits of a code: with more the product
    takes longer than dequantising and multiplying (measured at commit 5037fb76)."""
    bytes_max: float = 2.25
    """Maximum size of an operand, of that of the parts that it is made of: 1.52 for Q6_K, 1.64 for
    Q5_K and 2.12 for MXFP4, which are multiplied 21, 36 and 8 times as fast so (measured at commit
    5037fb76)."""
    made_numbers: int = 1 << 20
    """Numbers of a matrix that are brought into the layout at a time."""
    trial_error_max: float = 0.01
    """Maximum error of a product in the trial, relative to the norm of all; rounding makes
    0.003."""
    zero_max: int = 1 << 13
    """Maximum zero point of a group, in steps: with larger ones its numbers differ by less than
    they are rounded."""


OPERAND = OperandConfig()

CENTRE = {4: 8, 8: 136}
"""The code that stands for the offset alone, by bits of an operand's code."""
FACTOR = {4: 1, 8: 17}
"""How often a row's number meets the offset: 16 times for the upper half of a code, and once."""

HALVES = (torch.bfloat16, torch.float16)
"""Dtypes of rows that GPUs multiply by codes (:mod:`node.kernels.triton.packed`)."""

aten = torch.ops.aten


@dataclass(frozen=True, slots=True, kw_only=True)
class OperandPacking(Meaning):
    """What the parts of an operand mean; see :class:`node.packed.packing.Packing`.

    ``codes``, ``[..., outs, ins * bits / 8]`` bytes: for ``rows`` rows after the other, and within
    them column after column, a code of each of the first half in the lower 4 bits, one of each of
    the other half in the upper ones. ``scales``, ``[..., ins / columns, outs, 2]`` bfloat16: scale
    and offset. ``order``, ``[..., 1, ins]`` int32: the place that a column has in ``codes``.
    """

    bits: int
    """Bits of one code, 4 or 8."""
    columns: int
    """Columns that share a scale."""
    rows: int
    """Rows whose codes are interleaved."""
    joins = False  # rows are the second but last axis of scales

    def shape(self, parts: Parts) -> tuple[int, ...]:
        *leading, outs, width = parts["codes"].shape
        return (*leading, outs, width * 8 // self.bits)

    def some_rows(self, parts: Parts, start: int, end: int) -> dict[str, torch.Tensor]:
        some = {**parts, "codes": parts["codes"][..., start:end, :]}
        return {**some, "scales": parts["scales"][..., start:end, :]}

    def dequantise(
        self, parts: Parts, dtype: torch.dtype, room: Room | None = None
    ) -> torch.Tensor:
        room = room or Room()
        *leading, outs, ins = self.shape(parts)
        halved = (*leading, outs // self.rows, ins * self.bits // 4, self.rows // 2)
        halves = self._whole(parts["codes"].reshape(halved), -2)
        by_column = room.empty(
            (*leading, ins, outs // self.rows, 2, self.rows // 2),
            torch.float32,
            parts["codes"].device,
        )
        for half, codes in enumerate(halves):
            by_column[..., half, :].copy_(codes.transpose(-2, -3))
        groups = by_column.view(*leading, -1, self.columns, outs)
        scales, least = self._steps(parts["scales"])
        torch.addcmul(least[..., None, :], groups, scales[..., None, :], out=groups)
        values: torch.Tensor = groups.view(*leading, ins, outs)
        if "order" in parts:
            order = parts["order"].long().transpose(-1, -2)
            values = torch.gather(values, -2, order.expand(values.shape))
        values = values if dtype is torch.float32 else room.copy(values, dtype)
        return values.transpose(-1, -2)

    def picked(self, parts: Parts, places: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        _, ins = self.shape(parts)
        half, place = self.rows // 2, places % self.rows
        together = parts["codes"].view(-1, ins * self.bits // 4, half)
        lower, upper = self._whole(together[places // self.rows, :, place % half], -1)
        codes = torch.where((place < half)[:, None], lower, upper)
        scales, least = self._steps(parts["scales"][:, places])
        groups = torch.unflatten(codes, -1, (-1, self.columns)).float()
        values = (groups * scales.t()[..., None] + least.t()[..., None]).flatten(-2)
        if "order" in parts:
            values = values[:, parts["order"][0].long()]
        return values.to(dtype)

    def product(self, parts: Parts, rows: torch.Tensor) -> torch.Tensor | None:
        """``rows``, ``[count, ins]``, times the matrix; None for many rows and other dtypes."""
        count, ins = rows.shape
        if rows.device.type != "cpu" or rows.dtype is not torch.bfloat16:
            return None
        if not 0 < count * self.bits <= OPERAND.row_bits_max:
            return None
        if "order" in parts:
            rows = torch.empty_like(rows).index_copy_(1, parts["order"][0].long(), rows)
        group = self.columns
        if self.bits == 8:
            numbers = rows.view(count, ins // group, 1, group)
            rows, group = torch.cat([numbers * 16, numbers], dim=2).view(count, -1), 2 * group
        made: torch.Tensor = aten._weight_int4pack_mm_for_cpu(
            rows.contiguous(), parts["codes"], group, parts["scales"]
        )
        return made

    def is_finite(self, parts: Parts, dtype: torch.dtype) -> bool:
        largest = 2 * CENTRE[self.bits] * parts["scales"].abs().amax().float()
        return bool(largest <= torch.finfo(dtype).max)

    def made_up(self, parts: Parts) -> dict[str, torch.Tensor]:
        codes, scales = parts["codes"], parts["scales"]
        made = {
            "codes": random_bytes(codes.numel(), 0x77).reshape(codes.shape),
            "scales": torch.full(scales.shape, 1e-3, dtype=scales.dtype),
        }
        if "order" in parts:
            order = torch.arange(parts["order"].shape[-1], dtype=torch.int32)
            made["order"] = order.expand(parts["order"].shape)
        return made

    def _whole(self, bytes_: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes of both halves of the rows, from bytes whose columns are at ``dim``."""
        if self.bits == 4:
            return bytes_ & 15, bytes_ >> 4
        apart = torch.unflatten(bytes_, dim, (-1, 2, self.columns))
        upper, lower = apart.unbind(dim - 1)
        both = upper << 4 | lower & 15, upper & 0xF0 | lower >> 4
        return both[0].flatten(dim - 1, dim), both[1].flatten(dim - 1, dim)

    def _steps(self, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Scales and what the code 0 stands for, as float32."""
        steps, offsets = (each.contiguous() for each in scales.float().unbind(-1))
        return steps, offsets * FACTOR[self.bits] - steps * CENTRE[self.bits]


def operand_of(packed: PackedTensor, device: torch.device) -> PackedTensor:
    """``packed`` in the layout that ``device`` multiplies the fastest in its dtype.

    That is the stored one where there is no other, or where another takes much more memory.
    ``packed`` may be on the meta device, to learn sizes.
    """
    if device.type == "cuda" and packed.dtype in HALVES:
        return packed if isinstance(packed.packing, Packing) else _made_grid(packed)
    if device.type != "cpu" or packed.dtype is not torch.bfloat16:
        return packed
    together = _rows_together()
    return packed if together is None else _made(packed, together)


def _made_grid(packed: PackedTensor) -> PackedTensor:
    """Blocks as codes with a scale and a zero point for each group of columns."""
    *leading, outs, ins = packed.packing.shape(packed.parts)
    known = _first_rows(packed, 1)
    if known is None or (leading and "order" in packed.parts):
        return packed
    bits = 4 if known.bits == 4 else 8
    codes = packed.parts["codes"].new_empty((*leading, outs, ins * bits // 8), dtype=torch.uint8)
    grid = (*leading, outs, ins // known.columns)
    parts = {
        "codes": codes,
        "scales": codes.new_empty(grid, dtype=torch.bfloat16),
        "zeros": codes.new_empty(grid, dtype=torch.float16),
    }
    packing = Packing(code="uint4" if bits == 4 else "uint8", columns=known.columns)
    moved = {name: part for name, part in packed.parts.items() if name == "order"}
    made = PackedTensor(packing, parts | moved, packed.dtype, turned=packed.turned)
    if made.held_bytes > OPERAND.bytes_max * packed.held_bytes:
        return packed
    for start, end, affine in _by_rows(packed, 1):
        some = packing.some_rows(parts, start, end)
        steps = affine.scales.to(torch.bfloat16).float()
        flat = affine.least.abs() >= steps.abs() * OPERAND.zero_max  # or empty
        steps = torch.where(flat, affine.least.abs().to(torch.bfloat16).float(), steps)
        steps = torch.where(steps == 0, 1.0, steps)
        numbers = affine.codes.masked_fill(flat.repeat_interleave(known.columns, dim=-1), 0)
        if bits == 4:
            numbers = numbers[..., ::2] | numbers[..., 1::2] << 4
        some["codes"].copy_(numbers)
        some["scales"].copy_(steps)
        some["zeros"].copy_(-affine.least / steps)
    return made


def _first_rows(packed: PackedTensor, at_least: int) -> Affine | None:
    """The first rows as steps of one size, to see whether all are."""
    outs = packed.packing.shape(packed.parts)[-2]
    some = packed.packing.some_rows(packed.parts, 0, min(at_least, outs))
    return packed.packing.affine(some)


def _by_rows(packed: PackedTensor, at_least: int) -> Iterator[tuple[int, int, Affine]]:
    """A few rows at a time, multiples of ``at_least``: ``[start, end)``, and their steps."""
    *leading, outs, ins = packed.packing.shape(packed.parts)
    rows = max(1, OPERAND.made_numbers // (math.prod(leading) * ins * at_least)) * at_least
    for start in range(0, outs if packed.parts["codes"].device.type != "meta" else 0, rows):
        end = min(start + rows, outs)
        affine = packed.packing.affine(packed.packing.some_rows(packed.parts, start, end))
        if affine is not None:  # as for the first rows
            yield start, end, affine


def _made(packed: PackedTensor, together: int) -> PackedTensor:
    *leading, outs, ins = packed.packing.shape(packed.parts)
    order = packed.parts.get("order")
    if outs % together or (order is not None and order.shape[-2] > 1):
        return packed
    at_least = math.lcm(together, packed.packing.rows)
    known = _first_rows(packed, at_least)
    if known is None:
        return packed
    bits = 4 if known.bits == 4 else 8
    group = next((g for g in GROUPS if known.columns * bits // 4 % g == 0), None)
    if group is None:
        return packed
    columns = group * 4 // bits
    packing = OperandPacking(bits=bits, columns=columns, rows=together)
    codes = packed.parts["codes"].new_empty((*leading, outs, ins * bits // 8), dtype=torch.uint8)
    scales = codes.new_empty((*leading, ins // columns, outs, 2), dtype=torch.bfloat16)
    parts = {"codes": codes, "scales": scales}
    if order is not None:
        parts["order"] = order
    made = PackedTensor(packing, parts, packed.dtype, turned=packed.turned)
    if made.held_bytes > OPERAND.bytes_max * packed.held_bytes:
        return packed
    for start, end, affine in _by_rows(packed, at_least):
        some = packing.some_rows(parts, start, end)
        some["codes"].copy_(_interleaved(affine, packing))
        some["scales"].copy_(_offset(affine, packing))
    return made


def _interleaved(affine: Affine, packing: OperandPacking) -> torch.Tensor:
    """Codes in the operand's layout."""
    codes = affine.codes
    if packing.bits == 8:
        groups = torch.unflatten(codes + _raised(affine), -1, (-1, packing.columns))
        codes = torch.stack([groups >> 4, groups & 15], dim=-2).flatten(-3)
    halves = torch.unflatten(codes, -2, (-1, 2, packing.rows // 2))
    lower, upper = halves.unbind(-3)
    made = (lower | upper << 4).transpose(-1, -2)
    return made.reshape(*codes.shape[:-1], -1)


def _raised(affine: Affine) -> int:
    """What is added to codes that leave room for it, so that the middle one needs no offset."""
    return CENTRE[8] - (1 << affine.bits - 1) if 4 < affine.bits < 8 else 0


def _offset(affine: Affine, packing: OperandPacking) -> torch.Tensor:
    """Scales and offsets as the operand has them."""
    steps, centre = affine.scales, CENTRE[packing.bits] - _raised(affine)
    offsets = (affine.least + centre * steps) / FACTOR[packing.bits]
    both = torch.stack([steps, offsets], dim=-1)
    spread = both.repeat_interleave(affine.columns // packing.columns, dim=-2)
    return spread.transpose(-2, -3)


@functools.cache
def _rows_together() -> int | None:
    """How many rows this build of torch interleaves on this CPU; None: it has no such product.

    The operator is one that torch's own compiler emits, and not part of its documented interface,
    so its results are compared before anything relies on them.
    """
    codes = random_bytes(128 * 64, 0xFF).view(128, 64)
    generator = torch.Generator().manual_seed(0)
    scales = torch.rand(128, 2, generator=generator) + 0.5
    packed = PackedTensor(
        Packing(code="uint4", columns=64), {"codes": codes, "scales": scales}, torch.bfloat16
    )
    rows = torch.randn(5, 128, generator=generator).bfloat16()
    try:
        for together in ROWS_TOGETHER:
            made = _made(packed, together)
            got = made.packing.product(made.parts, rows)
            right = rows.float() @ packed.dequantised().float().t()
            if got is not None and (got - right).norm() < OPERAND.trial_error_max * right.norm():
                return together
    except (AttributeError, RuntimeError) as error:
        logger.warning("packed weights are dequantised: %s", first_line(error))
        return None
    logger.warning("packed weights are dequantised: torch's product of 4-bit codes differs")
    return None
