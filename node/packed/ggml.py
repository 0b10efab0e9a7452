"""Weights in the blocks of GGUF files: each block has its own codes, scales and minima.

Rows are whole blocks one after the other, so a matrix has one part, ``codes``, ``[outs, bytes]``
(or with leading dimensions), and whatever moves rows moves bytes. Where columns were moved,
``order``, ``[1, ins]``, has the place of each in the blocks. What the blocks of a type mean is
transformers' code on tensors of any device, and for the types that it lacks the ``gguf`` package's
on the CPU.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import torch

from dht.checkpoints.gguf_header import known_kinds
from node.packed.packing import (
    E2M1_BITS,
    E2M1_CENTRE,
    EXPONENT_BIAS,
    Affine,
    Meaning,
    Parts,
    Room,
    e2m1_steps,
    random_bytes,
)
from node.packed.stored import Rule
from node.packed.tensor import PackedTensor

MADE_UP = 0x13
"""Bits of made up bytes: a float16 of them is at most 0.001, and a scale in few bits is small."""
HALVES = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS"), (0,)),
    **dict.fromkeys(("IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "TQ1_0": (52,), "TQ2_0": (64,),
}  # fmt: skip
"""Places of a block's float16 numbers; all else in it multiplies them."""
MULTIPLE = 1 << 12
"""Maximum of what else multiplies such a number, in all types (Q6_K: scale 128, code 32)."""
CHECKED_NUMBERS = 1 << 17
"""Numbers that are looked at together for infinities."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPacking(Meaning):
    """What the bytes of a matrix mean; see :class:`node.packed.packing.Packing`."""

    kind: str
    """Name of the blocks' type, as ``Q4_K``."""

    def shape(self, parts: Parts) -> tuple[int, ...]:
        *rows, width = parts["codes"].shape
        _, numbers, block_bytes = by_name()[self.kind]
        ins = width // block_bytes * numbers
        if width % block_bytes or not rows:
            raise ValueError(f"rows of {width} bytes in {self.kind}")
        if "order" in parts and parts["order"].shape != (1, ins):
            raise ValueError(f"an order of {tuple(parts['order'].shape)} for {ins} columns")
        return (*rows, ins)

    def some_rows(self, parts: Parts, start: int, end: int) -> dict[str, torch.Tensor]:
        return {**parts, "codes": parts["codes"][..., start:end, :]}

    def dequantise(
        self, parts: Parts, dtype: torch.dtype, room: Room | None = None
    ) -> torch.Tensor:
        numbers = _meaning(self.kind)(parts["codes"].contiguous().view(-1)).view(self.shape(parts))
        if "order" in parts:
            numbers = numbers[..., parts["order"][0].long()]
        return numbers.to(dtype)

    def picked(self, parts: Parts, places: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return self.dequantise({**parts, "codes": parts["codes"][places]}, dtype)

    def affine(self, parts: Parts) -> Affine | None:
        if self.kind not in AFFINE:
            return None
        block_bytes = by_name()[self.kind][2]
        return AFFINE[self.kind](torch.unflatten(parts["codes"], -1, (-1, block_bytes)))

    def is_finite(self, parts: Parts, dtype: torch.dtype) -> bool:
        rows = parts["codes"].flatten(0, -2)
        if self.kind in HALVES:
            blocks = rows.reshape(-1, by_name()[self.kind][2])
            bound = torch.zeros(())
            for place in HALVES[self.kind]:
                halves = blocks[:, place : place + 2].contiguous().view(torch.float16)
                bound = bound + halves.abs().amax().cpu().float() * MULTIPLE
            if not torch.isfinite(bound):
                return False
            if bound <= torch.finfo(dtype).max:
                return True
        count = max(1, CHECKED_NUMBERS // self.shape(parts)[-1])
        return all(
            bool(torch.isfinite(self.dequantise({"codes": some}, dtype)).all())
            for some in torch.split(rows, count)
        )

    def made_up(self, parts: Parts) -> dict[str, torch.Tensor]:
        shape = parts["codes"].shape
        return {**parts, "codes": random_bytes(shape.numel(), MADE_UP).reshape(shape)}


def _halves(blocks: torch.Tensor, place: int) -> torch.Tensor:
    """A float16 of each block as float32, ``[..., blocks]``."""
    return blocks[..., place : place + 2].contiguous().view(torch.float16)[..., 0].float()


def _nibbles(bytes_: torch.Tensor) -> torch.Tensor:
    """Lower halves of the last axis, then the upper ones."""
    return torch.cat([bytes_ & 15, bytes_ >> 4], dim=-1)


def _q4_0(blocks: torch.Tensor) -> Affine:
    scales, codes = _halves(blocks, 0), _nibbles(blocks[..., 2:]).flatten(-2)
    return Affine(bits=4, columns=32, codes=codes, scales=scales, least=scales * -8)


def _q4_1(blocks: torch.Tensor) -> Affine:
    codes = _nibbles(blocks[..., 4:]).flatten(-2)
    scales, least = _halves(blocks, 0), _halves(blocks, 2)
    return Affine(bits=4, columns=32, codes=codes, scales=scales, least=least)


def _fifth_bits(bytes_: torch.Tensor) -> torch.Tensor:
    """Bits of 32 columns, the lowest first, as the fifth ones of their codes."""
    places = torch.arange(8, dtype=torch.uint8, device=bytes_.device)
    return (bytes_[..., None] >> places & 1).flatten(-2) << 4


def _q5_0(blocks: torch.Tensor) -> Affine:
    scales = _halves(blocks, 0)
    codes = (_nibbles(blocks[..., 6:]) | _fifth_bits(blocks[..., 2:6])).flatten(-2)
    return Affine(bits=5, columns=32, codes=codes, scales=scales, least=scales * -16)


def _q5_1(blocks: torch.Tensor) -> Affine:
    scales, least = _halves(blocks, 0), _halves(blocks, 2)
    codes = (_nibbles(blocks[..., 8:]) | _fifth_bits(blocks[..., 4:8])).flatten(-2)
    return Affine(bits=5, columns=32, codes=codes, scales=scales, least=least)


def _q8_0(blocks: torch.Tensor) -> Affine:
    scales, codes = _halves(blocks, 0), (blocks[..., 2:] ^ 0x80).flatten(-2)
    return Affine(bits=8, columns=32, codes=codes, scales=scales, least=scales * -128)


def _q4_k(blocks: torch.Tensor) -> Affine:
    scales, least = _k_scales(blocks)
    codes = _nibbles(torch.unflatten(blocks[..., 16:], -1, (4, 32))).flatten(-3)
    return Affine(bits=4, columns=32, codes=codes, scales=scales, least=least)


def _q5_k(blocks: torch.Tensor) -> Affine:
    scales, least = _k_scales(blocks)
    lower = _nibbles(torch.unflatten(blocks[..., 48:], -1, (4, 32))).flatten(-2)
    places = torch.arange(8, dtype=torch.uint8, device=blocks.device)
    upper = blocks[..., None, 16:48] >> places[:, None] & 1
    codes = (lower | upper.flatten(-2) << 4).flatten(-2)
    return Affine(bits=5, columns=32, codes=codes, scales=scales, least=least)


def _q6_k(blocks: torch.Tensor) -> Affine:
    lower = _nibbles(torch.unflatten(blocks[..., :128], -1, (2, 64)))
    places = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device)
    pairs = torch.unflatten(blocks[..., 128:192], -1, (2, 1, 32))
    upper = pairs >> places[:, None] & 3
    scales = _halves(blocks, 208)[..., None] * blocks[..., 192:208].view(torch.int8)
    return Affine(
        bits=6,
        columns=16,
        codes=(lower | upper.flatten(-2) << 4).flatten(-3),
        scales=scales.flatten(-2),
        least=scales.flatten(-2) * -32,
    )


def _mxfp4(blocks: torch.Tensor) -> Affine:
    scales = torch.exp2(blocks[..., 0].float() - (EXPONENT_BIAS + 1))
    codes = e2m1_steps(_nibbles(blocks[..., 1:]).flatten(-2))
    least = scales * -E2M1_CENTRE
    return Affine(bits=E2M1_BITS, columns=32, codes=codes, scales=scales, least=least)


def _k_scales(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and what the code 0 stands for, of eight groups in each block."""
    first, second, rest = torch.split(blocks[..., 4:16], 4, dim=-1)
    scales = torch.cat([first & 63, rest & 15 | first >> 6 << 4], dim=-1)
    minima = torch.cat([second & 63, rest >> 4 | second >> 6 << 4], dim=-1)
    return (
        (_halves(blocks, 0)[..., None] * scales).flatten(-2),
        (_halves(blocks, 2)[..., None] * minima).flatten(-2).neg_(),
    )


AFFINE: dict[str, Callable[[torch.Tensor], Affine]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "MXFP4": _mxfp4,
}
"""Types whose numbers are steps of one size in groups of 32, or 16 with codes of 6 bits, from
blocks ``[..., blocks, bytes]`` (``ggml-common.h``, ``dequantize_row_q4_K`` of llama.cpp)."""


def ggml_rules() -> list[Rule]:
    """A weight is one tensor under its own name, packed by its type."""
    return [
        Rule(
            anchor=("codes", ""),
            dtypes=frozenset({name}),
            ending="",
            make=partial(_packed, BlockPacking(kind=name)),
        )
        for name, (_, numbers, _) in by_name().items()
        if numbers > 1
    ]


def _packed(packing: BlockPacking, parts: Parts) -> torch.Tensor:
    return PackedTensor(packing, parts)


@cache
def by_name() -> dict[str, tuple[int, int, int]]:
    """Number, numbers in a block and bytes of a block of each type of tensor."""
    known = known_kinds().items()
    return {name: (kind, numbers, size_bytes) for kind, (name, numbers, size_bytes) in known}


@cache
def _meaning(kind: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """What turns bytes, ``[bytes]``, into float32."""
    from transformers.integrations.gguf import dequant

    number, numbers, block_bytes = by_name()[kind]
    if number in dequant.GGML_BLOCK:
        return partial(dequant.dequantize, ggml_type=number)

    import numpy as np
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    def slowly(bytes_: torch.Tensor) -> torch.Tensor:
        if bytes_.device.type == "meta":
            return bytes_.new_empty(bytes_.numel() // block_bytes * numbers, dtype=torch.float32)
        with np.errstate(all="ignore"):
            made = dequantize(bytes_.cpu().view(1, -1).numpy(), GGMLQuantizationType(number))
        return torch.from_numpy(made).view(-1).to(bytes_.device)

    return slowly
