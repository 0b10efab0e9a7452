"""The general packed matrix: codes of a few bits, a grid of scales, perhaps zero points.

Parts, of which all may have the same leading dimensions (one matrix per expert):

``codes``
    ``[outs, ins * bits / 8]`` bytes; where a byte holds two codes, the lower half comes first.
``scales``
    ``[outs / rows, ins / columns]``, each rounded up; floats, or bytes that are exponents of two.
``zeros``
    of the scales' shape: the code that stands for zero.
``factors``
    ``[outs, 1]`` float32: what a row is multiplied by beside its scales.
``order``
    ``[bands, ins]`` int32: the place that a column has in ``codes`` (GPTQ's act-order), for each of
    the equal bands of rows that the matrix was joined of.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import torch

Parts = Mapping[str, torch.Tensor]
Multiply = Callable[[torch.Tensor, "Packing", Parts], torch.Tensor]
"""Interface of :func:`node.kernels.triton.packed.packed_product`: rows ``[count, ins]`` times a
matrix."""

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""4-bit floats without their sign (OCP Microscaling Formats 1.0, §5.3.3)."""
CODES: dict[str, tuple[float, ...]] = {
    "uint4": tuple(float(code) for code in range(16)),
    "offset4": tuple(float(code - 8) for code in range(16)),
    "e2m1": (*E2M1, *(-value for value in E2M1)),
}
"""What each 4-bit code stands for, rounded to float16; other kinds are dtypes of one byte."""
BYTES: dict[str, torch.dtype] = {
    "int8": torch.int8,
    "uint8": torch.uint8,
    "float8_e4m3": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}
LARGEST = {
    **{code: max(map(abs, values)) for code, values in CODES.items()},
    **{"int8": 128.0, "uint8": 255.0, "float8_e4m3": 448.0, "float8_e5m2": 57344.0},
}
"""Largest magnitude among the numbers that the codes of a kind stand for."""
CENTRES = {"uint4": 0, "offset4": 8, "int8": 128, "uint8": 0}
"""Kinds whose codes, read as unsigned integers, are steps of one size; the code that is zero."""
E2M1_BITS, E2M1_CENTRE = 5, 16
"""Fixed by OCP Microscaling Formats 1.0: numbers of E2M1 are whole numbers of halves. Steps of one
size in five bits, and their zero."""
EXPONENT_BIAS = 127
"""Fixed by OCP Microscaling Formats 1.0: exponent 0 as a byte (E8M0)."""
E4M3_BITS = 0xBF80 - (1 << 16)
"""Fixed by OCP's 8-bit floating point: sign, exponent and fraction of an E4M3 number within a
float16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Affine:
    """A matrix whose numbers are ``scales * codes + least`` in groups of columns."""

    bits: int
    """Bits of one code, 4 to 8."""
    columns: int
    """Columns that share a scale."""
    codes: torch.Tensor
    """Unsigned integers, ``[..., outs, ins]`` bytes."""
    scales: torch.Tensor
    """``[..., outs, ins / columns]`` float32."""
    least: torch.Tensor
    """What the code 0 stands for, of the scales' shape and dtype."""


class Meaning(ABC):
    """What a packed tensor asks of the kind of its packing."""

    rows: int = 1
    """Rows that share scales, or bytes."""
    joins = True
    """Whether joining the parts of matrices joins their rows."""

    @abstractmethod
    def shape(self, parts: Parts) -> tuple[int, ...]:
        """Shape of the matrix. Raises ValueError if the parts do not fit each other."""

    def by_row(self, parts: Parts) -> "tuple[Meaning, Parts]":
        """The same matrix with scales for each row alone."""
        return self, parts

    @abstractmethod
    def some_rows(self, parts: Parts, start: int, end: int) -> dict[str, torch.Tensor]:
        """Parts of rows ``[start, end)``; ``start`` is a multiple of ``rows``."""

    @abstractmethod
    def dequantise(
        self, parts: Parts, dtype: torch.dtype, room: "Room | None" = None
    ) -> torch.Tensor:
        """The matrix's numbers, ``[…, outs, ins]``; computed in float32 and rounded to ``dtype``
        once.

        They are in ``room`` where it is given, and stay until it is used again.
        """

    @abstractmethod
    def picked(self, parts: Parts, places: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Numbers of the rows at ``places``, ``[count, ins]``."""

    def product(self, parts: Parts, rows: torch.Tensor) -> torch.Tensor | None:
        """``rows``, ``[count, ins]``, times the matrix, from its bits; None: dequantise them."""
        return None

    def affine(self, parts: Parts) -> Affine | None:
        """The same numbers as steps of one size by groups; None if they are no such numbers."""
        return None

    @abstractmethod
    def is_finite(self, parts: Parts, dtype: torch.dtype) -> bool:
        """Whether no number can be too large for ``dtype``."""

    @abstractmethod
    def made_up(self, parts: Parts) -> dict[str, torch.Tensor]:
        """Parts of the same shapes, on the CPU, with random codes, to time with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing(Meaning):
    """What the parts of a packed matrix mean."""

    code: str
    """A name of CODES or BYTES."""
    rows: int = 1
    columns: int
    """Columns that share a scale."""
    multiply: "Multiply | None" = field(default=None, compare=False, repr=False)
    """Multiplies rows by the bits as they are; None: nothing does."""

    @property
    def bits(self) -> int:
        """Bits of one code."""
        return 4 if self.code in CODES else 8

    def shape(self, parts: Parts) -> tuple[int, ...]:
        *leading, outs, width = parts["codes"].shape
        ins = width * 8 // self.bits
        grid = (-(-outs // self.rows), -(-ins // self.columns))
        bands = parts["order"].shape[-2] if "order" in parts else 1
        wanted = {"scales": grid, "zeros": grid, "factors": (outs, 1), "order": (bands, ins)}
        if outs % max(bands, 1):
            raise ValueError(f"{bands} orders for {outs} rows")
        for name, part in parts.items():
            if name != "codes" and tuple(part.shape) != (*leading, *wanted[name]):
                raise ValueError(
                    f"{name} of shape {tuple(part.shape)} do not fit a matrix of"
                    f" {(*leading, outs, ins)} in blocks of {self.rows} x {self.columns}"
                )
        return (*leading, outs, ins)

    def by_row(self, parts: Parts) -> tuple["Packing", Parts]:
        codes = parts["codes"]
        rows = torch.arange(codes.shape[-2], device=codes.device) // self.rows
        spread = {
            name: part[..., rows, :] if name in ("scales", "zeros") else part
            for name, part in parts.items()
        }
        return replace(self, rows=1), spread

    def some_rows(self, parts: Parts, start: int, end: int) -> dict[str, torch.Tensor]:
        first, last = start // self.rows, -(-end // self.rows)
        ranges = {"scales": slice(first, last), "zeros": slice(first, last)}
        some = {
            name: part[..., ranges.get(name, slice(start, end)), :]
            for name, part in parts.items()
            if name != "order"
        }
        if "order" in parts:
            band = parts["codes"].shape[-2] // parts["order"].shape[-2]
            rows = torch.arange(start, end, device=parts["order"].device) // band
            bands = parts["order"].shape[-2]
            some["order"] = parts["order"] if bands == 1 else parts["order"][..., rows, :]
        return some

    def dequantise(
        self, parts: Parts, dtype: torch.dtype, room: "Room | None" = None
    ) -> torch.Tensor:
        room = room or Room()
        values, larger = self._values(parts["codes"], room)
        *leading, outs, ins = values.shape
        scales = plain_scales(parts["scales"]) * larger
        zeros = parts["zeros"].to(values.dtype) / larger if "zeros" in parts else None
        if "factors" in parts and self.rows == 1:
            scales = scales * parts["factors"]
        if outs % self.rows or ins % self.columns:  # the last block is not whole
            across = torch.arange(ins, device=values.device) // self.columns
            down = torch.arange(outs, device=values.device) // self.rows
            if zeros is not None:
                values.sub_(zeros[..., down, :][..., across])
            values.mul_(scales[..., down, :][..., across])
        else:
            split = (*leading, outs // self.rows, self.rows, ins // self.columns, self.columns)
            blocks = values.view(split)
            if zeros is not None:
                blocks.sub_(zeros[..., :, None, :, None])
            blocks.mul_(scales[..., :, None, :, None])
        if "factors" in parts and self.rows != 1:
            values.mul_(parts["factors"])
        if "order" in parts:
            order = parts["order"].long()[..., None, :]
            bands = values.view(*leading, order.shape[-3], -1, ins)
            values = torch.gather(bands, -1, order.expand(bands.shape)).view(values.shape)
        return values if dtype is torch.float32 else room.copy(values, dtype)

    def picked(self, parts: Parts, places: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        spread, by_row = self.by_row(parts)
        some = {name: part if name == "order" else part[places] for name, part in by_row.items()}
        return spread.dequantise(some, dtype)

    def product(self, parts: Parts, rows: torch.Tensor) -> torch.Tensor | None:
        return None if self.multiply is None else self.multiply(rows, self, parts)

    def affine(self, parts: Parts) -> Affine | None:
        """The same numbers as steps of one size by groups; None for floats of 8 bits, and where
        the last group is not whole."""
        is_e2m1 = self.code == "e2m1"
        if not (is_e2m1 or self.code in CENTRES) or self.shape(parts)[-1] % self.columns:
            return None
        if self.rows > 1:
            spread, by_row = self.by_row(parts)
            return spread.affine(by_row)
        codes = parts["codes"].view(torch.uint8)
        if self.bits == 4:
            codes = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2)
        elif self.code == "int8":
            codes = codes ^ 0x80
        scales = plain_scales(parts["scales"])
        if "factors" in parts:
            scales = scales * parts["factors"]
        zeros: torch.Tensor | int = E2M1_CENTRE if is_e2m1 else CENTRES[self.code]
        if "zeros" in parts:
            zeros = zeros + parts["zeros"].float()
        bits = self.bits
        if is_e2m1:
            codes, bits, scales = e2m1_steps(codes), E2M1_BITS, scales / 2
        return Affine(
            bits=bits, columns=self.columns, codes=codes, scales=scales, least=-scales * zeros
        )

    def is_finite(self, parts: Parts, dtype: torch.dtype) -> bool:
        largest = LARGEST[self.code]
        if "zeros" in parts:
            largest *= 2
        bound = torch.tensor(largest)
        for name in ("scales", "factors"):
            if name in parts:
                bound = bound * plain_scales(parts[name]).abs().amax()
        return bool(bound <= torch.finfo(dtype).max)

    def made_up(self, parts: Parts) -> dict[str, torch.Tensor]:
        plain = {"scales": 1e-3, "factors": 1.0, "zeros": 7}
        made: dict[str, torch.Tensor] = {}
        for name, part in parts.items():
            if name == "codes":
                made[name] = random_bytes(part.numel(), 0x77).view(part.dtype).reshape(part.shape)
            elif name == "order":
                made[name] = torch.arange(part.shape[-1], dtype=part.dtype).expand(part.shape)
            elif name == "scales" and part.dtype is torch.uint8:
                made[name] = torch.full(part.shape, EXPONENT_BIAS - 10, dtype=part.dtype)
            else:
                made[name] = torch.full(part.shape, plain[name], dtype=part.dtype)
        return made

    def _values(self, codes: torch.Tensor, room: "Room") -> tuple[torch.Tensor, float]:
        """What the codes stand for over a number, ``[..., outs, ins]`` in float32, and that."""
        if self.bits == 4:
            table = _pairs(self.code, codes.device)
            pairs = room.empty(codes.shape, torch.int32, codes.device).view(-1)
            places = room.copy(codes, torch.int32, "places").view(-1)
            torch.index_select(table, 0, places, out=pairs)
            halves = pairs.view(torch.float16).view(*codes.shape[:-1], 2 * codes.shape[-1])
            return room.copy(halves, torch.float32), 1.0
        if codes.dtype is torch.float8_e4m3fn and codes.device.type == "cpu":
            # Bits are moved, many times as fast as torch's conversion on a CPU. The exponent's bias
            # is 7 here and 15 in float16. NaN is refused where files are read.
            wide = room.copy(codes.view(torch.int8), torch.int16)  # the sign fills the upper bits
            halves = wide.bitwise_left_shift_(7).bitwise_and_(E4M3_BITS).view(torch.float16)
            return room.copy(halves, torch.float32), 2.0**8
        return room.copy(codes, torch.float32), 1.0


class Room:
    """Memory that is used again and again: fresh pages cost more than what is computed in them."""

    def __init__(self) -> None:
        self._kept: dict[object, torch.Tensor] = {}

    def empty(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, use: str = ""
    ) -> torch.Tensor:
        """Memory of this shape; it is the one given last for this dtype and use."""
        numbers = math.prod(shape)
        kept = self._kept.get((dtype, use))
        if kept is None or kept.numel() < numbers:
            kept = self._kept[dtype, use] = torch.empty(numbers, dtype=dtype, device=device)
        return kept[:numbers].view(*shape)

    def copy(self, tensor: torch.Tensor, dtype: torch.dtype, use: str = "") -> torch.Tensor:
        """``tensor`` in another dtype, of the same shape."""
        return self.empty(tensor.shape, dtype, tensor.device, use).copy_(tensor)


def random_bytes(count: int, mask: int) -> torch.Tensor:
    """``[count]`` bytes of many values, with the bits of ``mask`` alone."""
    block = torch.arange(1 << 16).mul(40503).bitwise_right_shift(5).to(torch.uint8) & mask
    return block.repeat(-(-count // block.numel()))[:count]


def plain_scales(scales: torch.Tensor) -> torch.Tensor:
    """Scales as float32, of the same shape; bytes are exponents of two."""
    if scales.dtype is torch.uint8:
        return torch.exp2(scales.to(torch.float32) - EXPONENT_BIAS)
    return scales.to(torch.float32)


def e2m1_steps(codes: torch.Tensor) -> torch.Tensor:
    """E2M1 numbers, ``[...]`` of 4 bits, in halves from ``-E2M1_CENTRE``."""
    halves = torch.tensor(CODES["e2m1"], device=codes.device) * 2 + E2M1_CENTRE
    return halves.to(torch.uint8)[codes.int()]


@cache
def _pairs(code: str, device: torch.device) -> torch.Tensor:
    """Both numbers in a byte, as the bits of two float16 in an int32, ``[256]``."""
    values = torch.tensor(CODES[code], dtype=torch.float16)
    both = torch.stack([values.repeat(16), values.repeat_interleave(16)], dim=-1)
    return both.view(torch.int32)[:, 0].contiguous().to(device)
