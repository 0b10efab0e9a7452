"""A packed tensor computes as its numbers do, and stays packed where that is possible."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from node.packed import tensor as tensors
from node.packed.packing import Packing
from node.packed.tensor import PackedTensor, is_packed

OUTS, INS = 24, 32


def made(rows: int = 1, columns: int = 8, seed: int = 0, code: str = "e2m1") -> PackedTensor:
    generator = torch.Generator().manual_seed(seed)
    packing = Packing(code=code, rows=rows, columns=columns)
    width = INS * packing.bits // 8
    codes = torch.randint(0, 128, (OUTS, width), generator=generator).to(torch.uint8)
    scales = torch.rand(-(-OUTS // rows), -(-INS // columns), generator=generator)
    return PackedTensor(packing, {"codes": codes, "scales": scales})


Pair = tuple[Any, Any]


def both(step: Callable[[Any], Any], seed: int = 0) -> Pair:
    packed = made(seed=seed)
    return step(packed), step(packed.dequantised())


ROWS = torch.randn(2, 3, INS, generator=torch.Generator().manual_seed(5))
STAYS: dict[str, Callable[[Any], Any]] = {
    "stacked": lambda w: torch.stack([w, w]),
    "joined": lambda w: torch.cat([w, w]),
    "joined stacks": lambda w: torch.cat([torch.stack([w]), torch.stack([w, w])]),
    "joined rows of stacks": lambda w: torch.cat([torch.stack([w, w])] * 2, dim=1),
    "turned": lambda w: w.t(),
    "turned stack": lambda w: torch.stack([w, w]).transpose(-1, 1),
    "turned twice": lambda w: w.transpose(0, 1).contiguous().transpose(-1, -2),
    "one of a stack": lambda w: torch.stack([w, w])[1],
    "one by a tensor": lambda w: torch.stack([w, w])[torch.tensor(1)],
    "some of a stack": lambda w: torch.stack([w, w, w])[torch.tensor([2, 0])],
    "copied": lambda w: copy.deepcopy(w).clone().detach(),
    "moved": lambda w: w.to("cpu", torch.float64),
}
PLAIN: dict[str, Callable[[Any], Any]] = {
    "product": lambda w: nn.functional.linear(ROWS, w),
    "product with a bias": lambda w: nn.functional.linear(ROWS, w, torch.ones(OUTS)),
    "matrices": lambda w: ROWS[0] @ w.t(),
    "batches": lambda w: torch.bmm(ROWS, torch.stack([w, w]).transpose(1, 2)),
    "added": lambda w: torch.addmm(torch.ones(OUTS), ROWS[0], w.t()),
    "the other side": lambda w: w @ torch.ones(INS, 2),
    "rows": lambda w: nn.functional.embedding(torch.tensor([[3, 1], [0, 23]]), w),
    "a row": lambda w: w[2],
    "columns": lambda w: w[:, 3:9],
    "sum": lambda w: (w * 2 + 1).sum(),
    "joined columns": lambda w: torch.cat([w, w], dim=1),
    "joined with numbers": lambda w: torch.cat([w, torch.ones(1, INS)]),
    "another shape": lambda w: w.view(4, -1, INS),
}


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("name", [*STAYS, *PLAIN])
def test_it_computes_as_its_numbers(name: str, mode: Any) -> None:
    with mode():
        packed, plain = both({**STAYS, **PLAIN}[name])
        assert isinstance(packed, PackedTensor) == (name in STAYS)
        assert packed.shape == plain.shape
        assert packed.dtype == plain.dtype
        numbers = packed.dequantised() if isinstance(packed, PackedTensor) else packed
        torch.testing.assert_close(numbers, plain, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("rows", "columns"), [(1, 32), (5, 8), (24, 32), (7, 12)])
@pytest.mark.parametrize("code", ["e2m1", "int8"])
def test_products_go_by_tiles(
    rows: int, columns: int, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensors, "TILE_NUMBERS", 4 * INS)
    weight = made(rows, columns, code=code) if code != "int8" else as_int8(rows, columns)
    torch.testing.assert_close(
        nn.functional.linear(ROWS, weight), ROWS @ weight.dequantised().t(), rtol=1e-5, atol=1e-4
    )
    joined = torch.cat([weight, weight])
    assert isinstance(joined, PackedTensor)
    torch.testing.assert_close(joined.dequantised(), torch.cat([weight.dequantised()] * 2))


def as_int8(rows: int, columns: int) -> PackedTensor:
    generator = torch.Generator().manual_seed(3)
    codes = torch.randint(-128, 128, (OUTS, INS), generator=generator).to(torch.int8)
    scales = torch.rand(-(-OUTS // rows), -(-INS // columns), generator=generator)
    packing = Packing(code="int8", rows=rows, columns=columns)
    return PackedTensor(packing, {"codes": codes, "scales": scales})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_cpu_without_products_in_a_dtype_multiplies_in_float32(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(tensors, "multiplies", lambda asked: asked is torch.float32)
    packed = made().to(dtype)  # type: ignore[attr-defined]
    rows = ROWS[0].to(dtype)
    right = rows.float() @ made().dequantised().t()
    assert torch.equal(nn.functional.linear(rows, packed), right.to(dtype))


def test_a_module_takes_it_for_its_weight() -> None:
    weight = made()
    linear = nn.Linear(INS, OUTS, bias=True)
    bias = linear.bias.data
    linear.load_state_dict({"weight": weight, "bias": bias}, strict=True, assign=True)
    linear.requires_grad_(False)
    assert is_packed(linear)
    with torch.inference_mode():
        torch.testing.assert_close(linear(ROWS), ROWS @ weight.dequantised().t() + bias)
    assert not is_packed(nn.Linear(2, 2))


def test_it_holds_its_parts_and_no_more() -> None:
    stack = torch.stack([made(), made(seed=1)])
    assert isinstance(stack, PackedTensor)
    assert stack.held_bytes == 2 * (OUTS * INS // 2 + 4 * OUTS * INS // 8)
    shape = stack.to("meta")
    assert isinstance(shape, PackedTensor)
    assert shape.held_bytes == stack.held_bytes
    assert shape.made_up().held_bytes == stack.held_bytes


def test_numbers_beyond_a_dtype_are_found_without_them() -> None:
    packing = Packing(code="int8", columns=INS)
    codes = torch.ones(OUTS, INS, dtype=torch.int8)
    for scale, finite in ((400.0, True), (600.0, False), (float("inf"), False)):
        parts = {"codes": codes, "scales": torch.full((OUTS, 1), scale)}
        assert PackedTensor(packing, parts, torch.float16).is_finite is finite
