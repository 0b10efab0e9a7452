"""Operands of torch's product of 4-bit codes: the numbers and products of the stored weights."""

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from node.packed import operand
from node.packed.ggml import AFFINE, HALVES, BlockPacking, by_name
from node.packed.operand import OperandPacking, operand_of
from node.packed.packing import Packing
from node.packed.tensor import PackedTensor

OUTS, INS = 192, 256
CPU = torch.device("cpu")
ROUNDING = 0.006
"""Error of a product relative to its norm: activations, scales and results have 8 bits each."""


@pytest.fixture(autouse=True)
def _supported() -> None:
    if operand._rows_together() is None:
        pytest.skip("this torch or CPU has no product of 4-bit codes")


def packed(
    code: str, columns: int, *parts: str, rows: int = 1, leading: tuple[int, ...] = ()
) -> PackedTensor:
    generator = torch.Generator().manual_seed(0)
    packing = Packing(code=code, rows=rows, columns=columns)
    codes = torch.randint(
        0, 256, (*leading, OUTS, INS * packing.bits // 8), generator=generator
    ).to(torch.uint8)
    grid = (*leading, OUTS // rows, INS // columns)
    zeros = torch.randint(0, 8, grid, generator=generator)
    made = {
        "codes": codes.view(torch.int8) if code == "int8" else codes,
        "scales": torch.rand(grid, generator=generator) + 0.1,
        "zeros": zeros.to(torch.int8),
        "factors": torch.rand((*leading, OUTS, 1), generator=generator) + 0.5,
        "order": torch.randperm(INS, generator=generator).to(torch.int32).expand(*leading, 1, INS),
    }
    kept = {name: made[name] for name in ("codes", "scales", *parts)}
    return PackedTensor(packing, kept, torch.bfloat16)


def blocks(kind: str) -> PackedTensor:
    generator = torch.Generator().manual_seed(0)
    _, numbers, block_bytes = by_name()[kind]
    codes = torch.randint(0, 256, (OUTS, INS // numbers, block_bytes), generator=generator)
    codes = codes.to(torch.uint8)
    for place in HALVES.get(kind, ()):
        codes[..., place + 1] = 0x1C  # a float16 of a few thousandths
    if kind == "MXFP4":
        codes[..., 0] = codes[..., 0] % 8 + 118  # exponents of a few thousandths
    return PackedTensor(BlockPacking(kind=kind), {"codes": codes.flatten(1)}, torch.bfloat16)


MADE: dict[str, Callable[[], PackedTensor]] = {
    "uint4": lambda: packed("uint4", 64),
    "uint4, zeros": lambda: packed("uint4", 128, "zeros"),
    "uint4, wide groups": lambda: packed("uint4", INS, "zeros"),
    "offset4": lambda: packed("offset4", 32, "zeros"),
    "offset4, act-order": lambda: packed("offset4", 64, "order"),
    "offset4, factors": lambda: packed("offset4", 64, "factors"),
    "int8, by row": lambda: packed("int8", INS),
    "int8, by block": lambda: packed("int8", 64, rows=16),
    "e2m1": lambda: packed("e2m1", 32),
    "e2m1, by 16, factors": lambda: packed("e2m1", 16, "factors"),
    "uint8, zeros, act-order": lambda: packed("uint8", 128, "zeros", "order"),
    **{kind: lambda kind=kind: blocks(kind) for kind in AFFINE},
}


def exact(weight: PackedTensor) -> torch.Tensor:
    return weight.to(torch.float32).dequantised().double()  # type: ignore[attr-defined]


def error(got: torch.Tensor, right: torch.Tensor) -> float:
    return float((got.double() - right).norm() / right.norm())


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("count", [1, 5, 300])
def test_products_are_those_of_the_stored_numbers(name: str, count: int) -> None:
    stored = MADE[name]()
    made = operand_of(stored, CPU)
    assert isinstance(made.packing, OperandPacking)
    assert made.shape == stored.shape
    assert made.held_bytes <= operand.OPERAND.bytes_max * stored.held_bytes
    assert error(exact(made), exact(stored)) < ROUNDING
    rows = torch.randn(count, INS, generator=torch.Generator().manual_seed(1)).bfloat16()
    rows += 0.5  # rows need not be zero on average, and offsets must not spoil them
    right = rows.double() @ exact(stored).t()
    few = made.packing.product(made.parts, rows)
    assert (few is None) == (count == 300)
    assert error(nn.functional.linear(rows, made), right) < ROUNDING


@pytest.mark.parametrize("name", MADE)
def test_rows_and_copies_are_those_of_the_operand(name: str) -> None:
    made = operand_of(MADE[name](), CPU)
    whole = exact(made)
    ids = torch.tensor([[0, 31, 32], [63, 64, OUTS - 1]])
    picked = nn.functional.embedding(ids, made.to(torch.float32))  # type: ignore[attr-defined]
    torch.testing.assert_close(picked.double(), whole[ids], rtol=1e-6, atol=1e-6)
    for same in (copy.deepcopy(made), made.t().t(), made.clone()):
        assert isinstance(same, PackedTensor)
        assert same.packing == made.packing
        assert torch.equal(exact(same), whole)
    joined = torch.cat([made, made])
    assert torch.equal(joined, torch.cat([made.dequantised()] * 2))
    assert made.is_finite


def test_experts_of_a_stack_multiply_alone() -> None:
    stored = packed("offset4", 32, "order", leading=(3,))
    made = operand_of(stored, CPU)
    assert isinstance(made.packing, OperandPacking)
    assert error(exact(made), exact(stored)) < ROUNDING
    rows = torch.randn(2, INS, generator=torch.Generator().manual_seed(1)).bfloat16()
    for n in range(3):
        product = nn.functional.linear(rows, made[n])
        assert error(product, rows.double() @ exact(stored)[n].t()) < ROUNDING


def test_sizes_are_known_without_numbers() -> None:
    for make in MADE.values():
        stored = make()
        on_meta = operand_of(stored.to("meta"), CPU)  # type: ignore[arg-type]
        made = operand_of(stored, CPU)
        assert on_meta.device.type == "meta"
        assert (on_meta.packing, on_meta.held_bytes) == (made.packing, made.held_bytes)
        alike = on_meta.made_up()
        assert alike.device.type == "cpu"
        assert alike.held_bytes == made.held_bytes
        assert torch.isfinite(alike.dequantised()).all()


def test_large_matrices_are_brought_over_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = operand_of(blocks("Q4_K"), CPU)
    monkeypatch.setattr(operand, "OPERAND", replace(operand.OPERAND, made_numbers=1))
    pieces = operand_of(blocks("Q4_K"), CPU)
    assert all(torch.equal(part, pieces.parts[name]) for name, part in whole.parts.items())


@pytest.mark.parametrize(
    ("stored", "device"),
    [
        (packed("float8_e4m3", 32), CPU),  # no steps of one size
        (blocks("Q3_K"), CPU),  # three times the bytes
        (packed("uint4", 16), CPU),  # groups of fewer columns than torch has
        (packed("uint4", 64)[:40], CPU),  # no whole number of interleaved rows
        (packed("uint4", 64).to(torch.float32), CPU),  # torch is slow in others than bfloat16
        (packed("uint4", 64).to(torch.float16), CPU),
        (packed("uint4", 64), torch.device("cuda")),
        (operand_of(packed("uint4", 64), CPU), CPU),
    ],
)
def test_others_stay_as_they_are_stored(stored: PackedTensor, device: torch.device) -> None:
    assert operand_of(stored, device) is stored


def test_a_torch_that_multiplies_otherwise_is_not_relied_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Other:
        @staticmethod
        def _weight_int4pack_mm_for_cpu(rows: torch.Tensor, *_: object) -> torch.Tensor:
            return torch.zeros(rows.shape[0], 128, dtype=rows.dtype)

    for given in (Other, object()):
        monkeypatch.setattr(operand, "aten", given)
        operand._rows_together.cache_clear()
        stored = packed("uint4", 64)
        try:
            assert operand_of(stored, CPU) is stored
        finally:
            operand._rows_together.cache_clear()
