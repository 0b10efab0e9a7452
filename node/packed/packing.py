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
    ``[1, ins]`` int32: the place that a column of the matrix has in ``codes`` (GPTQ's act-order).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

import torch

Parts = Mapping[str, torch.Tensor]

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""4-bit floats without their sign (OCP Microscaling Formats 1.0, §5.3.3)."""
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""4-bit NormalFloat (Dettmers et al., QLoRA, NeurIPS'23, appendix E)."""
CODES: dict[str, tuple[float, ...]] = {
    "uint4": tuple(float(code) for code in range(16)),
    "offset4": tuple(float(code - 8) for code in range(16)),
    "e2m1": (*E2M1, *(-value for value in E2M1)),
    "nf4": NF4,
}
"""What each 4-bit code stands for; other kinds are dtypes of one byte."""
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
"""Of the numbers that a kind of code stands for."""
EXPONENT_BIAS = 127
"""Exponent 0 as a byte (E8M0)."""
E4M3_BITS = 0x87F00000 - (1 << 32)
"""Sign, exponent and fraction of an E4M3 number within a float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """What the parts of a packed matrix mean."""

    code: str
    """A name of CODES or BYTES."""
    rows: int = 1
    """Rows that share a scale."""
    columns: int
    """Columns that share a scale."""

    @property
    def bits(self) -> int:
        """Bits of one code."""
        return 4 if self.code in CODES else 8

    def shape(self, parts: Parts) -> tuple[int, ...]:
        """Shape of the matrix. Raises ValueError if the parts do not fit each other."""
        *leading, outs, width = parts["codes"].shape
        ins = width * 8 // self.bits
        grid = (-(-outs // self.rows), -(-ins // self.columns))
        wanted = {"scales": grid, "zeros": grid, "factors": (outs, 1), "order": (1, ins)}
        for name, part in parts.items():
            if name != "codes" and tuple(part.shape) != (*leading, *wanted[name]):
                raise ValueError(
                    f"{name} of shape {tuple(part.shape)} do not fit a matrix of"
                    f" {(*leading, outs, ins)} in blocks of {self.rows} x {self.columns}"
                )
        return (*leading, outs, ins)

    def by_row(self, parts: Parts) -> tuple["Packing", Parts]:
        """The same matrix with a scale for each row alone."""
        outs = parts["codes"].shape[-2]
        spread = {
            name: part.repeat_interleave(self.rows, dim=-2)[..., :outs, :]
            if name in ("scales", "zeros")
            else part
            for name, part in parts.items()
        }
        return replace(self, rows=1), spread

    def some_rows(self, parts: Parts, start: int, end: int) -> dict[str, torch.Tensor]:
        """Parts of rows ``[start, end)``; ``start`` is a multiple of ``rows``."""
        first, last = start // self.rows, -(-end // self.rows)
        ranges = {"scales": (first, last), "zeros": (first, last), "order": (0, 1)}
        return {
            name: part[..., slice(*ranges.get(name, (start, end))), :]
            for name, part in parts.items()
        }

    def dequantise(self, parts: Parts, dtype: torch.dtype) -> torch.Tensor:
        """The matrix's numbers; computed in float32 and rounded to ``dtype`` once."""
        values = self._values(parts["codes"])
        *leading, outs, ins = values.shape
        scales, zeros = plain_scales(parts["scales"]), parts.get("zeros")
        if "factors" in parts and self.rows == 1:
            scales = scales * parts["factors"]
        if outs % self.rows or ins % self.columns:  # the last block is not whole
            at = torch.arange(ins, device=values.device) // self.columns
            spread = scales[..., at].repeat_interleave(self.rows, dim=-2)[..., :outs, :]
            if zeros is not None:
                moved = zeros[..., at].repeat_interleave(self.rows, dim=-2)[..., :outs, :]
                values = values - moved.to(values.dtype)
            made = values.mul_(spread)
        else:
            split = (*leading, outs // self.rows, self.rows, ins // self.columns, self.columns)
            blocks = values.view(split)
            if zeros is not None:
                blocks.sub_(zeros[..., :, None, :, None].to(values.dtype))
            made = blocks.mul_(scales[..., :, None, :, None]).view(values.shape)
        if "factors" in parts and self.rows != 1:
            made.mul_(parts["factors"])
        if "order" in parts:
            order = parts["order"].long().expand(made.shape)
            made = torch.gather(made, -1, order)
        return made.to(dtype)

    def _values(self, codes: torch.Tensor) -> torch.Tensor:
        """What the codes stand for, in float32, ``[..., outs, ins]``."""
        if self.bits == 4:
            pairs = torch.index_select(
                _pairs(self.code, codes.device), 0, codes.reshape(-1).int()
            )
            return pairs.view(torch.float32).view(*codes.shape[:-1], 2 * codes.shape[-1])
        if codes.device.type == "cpu" and codes.dtype is torch.float8_e4m3fn:
            return _wide(codes)
        return codes.to(torch.float32)


def plain_scales(scales: torch.Tensor) -> torch.Tensor:
    """Scales as float32; bytes are exponents of two."""
    if scales.dtype is torch.uint8:
        return torch.exp2(scales.to(torch.float32) - EXPONENT_BIAS)
    return scales.to(torch.float32)


def _wide(codes: torch.Tensor) -> torch.Tensor:
    """E4M3 to float32 by moving bits: ten times as fast as torch's conversion on a CPU.

    The exponent's bias is 7 there and 127 here. Codes that stand for NaN are refused at reading.
    """
    wide = codes.view(torch.int8).to(torch.int32)  # the sign fills the upper bits
    bits = wide.bitwise_left_shift_(20).bitwise_and_(E4M3_BITS)
    return bits.view(torch.float32).mul_(2.0**120)


@cache
def _pairs(code: str, device: torch.device) -> torch.Tensor:
    """Both numbers in a byte as the bits of one int64, ``[256]``."""
    values = torch.tensor(CODES[code], dtype=torch.float32)
    both = torch.stack([values.repeat(16), values.repeat_interleave(16)], dim=-1)
    return both.view(torch.int64)[:, 0].contiguous().to(device)
