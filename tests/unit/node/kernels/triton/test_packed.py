"""Products by packed weights: those of the numbers, for every code, alone and by experts; without a
GPU the kernel is interpreted on the CPU."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from node.engine.engine import Engine, EngineConfig
from node.packed.ggml import AFFINE
from node.packed.operand import operand_of
from node.packed.packing import CODES, Packing, Parts
from node.packed.tensor import PackedTensor
from node.weights.store import WeightStore
from testing.packed_checkpoints import FORMATS, write
from testing.tiny_families import make
from tests.unit.node.model.execution.test_cuda_graphs import PROMPTS, answers
from tests.unit.node.packed.test_operand import blocks

pytest.importorskip("triton", reason="Triton has no wheels for this platform")

from node.kernels.choice import RowsKernels
from node.kernels.moe import OURS
from node.kernels.packed import is_multiplied, multiply_packed
from node.kernels.triton import grouped_gemm, packed
from node.kernels.triton.gate import gate_rows
from node.kernels.triton.groups import group
from node.kernels.triton.kv_rows import write_rows
from node.kernels.triton.packed import (
    ALONE,
    BYTES,
    DEQUANTISED_ROWS,
    SCALE_MAX,
    WORDS,
    dequantised,
    packed_product,
    takes,
)
from node.kernels.triton.rms_norm import norm_rows
from node.kernels.triton.rotary import rotate_heads
from node.kernels.triton.router import choose_experts

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
KINDS: dict[str, tuple[dict[str, Any], tuple[int, int], frozenset[str]]] = {
    "uint4, zeros": ({"code": "uint4", "columns": 64}, (40, 192), frozenset({"zeros"})),
    "offset4": ({"code": "offset4", "columns": 128}, (33, 256), frozenset()),
    "mxfp4": ({"code": "e2m1", "columns": 32}, (40, 96), frozenset({"exponents"})),
    "nvfp4": ({"code": "e2m1", "columns": 16}, (40, 96), frozenset({"factors"})),
    "int8 by rows": ({"code": "int8", "columns": 304}, (40, 304), frozenset()),
    "uint8, zeros": ({"code": "uint8", "columns": 32}, (40, 320), frozenset({"zeros"})),
    "fp8 by blocks": (
        {"code": "float8_e4m3", "rows": 128, "columns": 128}, (150, 272), frozenset(),
    ),
    "e5m2 by blocks": (
        {"code": "float8_e5m2", "rows": 128, "columns": 128}, (150, 272), frozenset(),
    ),
    "ordered": ({"code": "uint4", "columns": 32}, (24, 96), frozenset({"order", "zeros"})),
    "uint4, several tiles": ({"code": "uint4", "columns": 64}, (32, 2048), frozenset({"zeros"})),
    "nvfp4, several tiles": ({"code": "e2m1", "columns": 16}, (16, 1024), frozenset({"factors"})),
    "fp8, the last tile in part": (
        {"code": "float8_e4m3", "rows": 128, "columns": 128}, (33, 1200), frozenset(),
    ),
}  # fmt: skip
"""Packing, shape, and what parts there are."""


def drawn(kind: str, experts: int | None = None) -> PackedTensor:
    """Random codes, all of them, and scales."""
    named, (outs, ins), parts = KINDS[kind]
    packing = Packing(**named)
    leading = () if experts is None else (experts,)
    width = ins * packing.bits // 8
    codes = torch.randint(0, 256, (*leading, outs, width), dtype=torch.uint8)
    if packing.code.startswith("float8"):  # no NaN, nor infinity
        float8 = torch.float8_e4m3fn if packing.code == "float8_e4m3" else torch.float8_e5m2
        codes = (codes & 0xBF).view(float8)
    grid = (*leading, -(-outs // packing.rows), -(-ins // packing.columns))
    made: dict[str, Tensor] = {
        "codes": codes.view(torch.int8) if packing.code == "int8" else codes,
        "scales": torch.rand(grid) + 0.5,
    }
    if "exponents" in parts:
        made["scales"] = torch.randint(118, 129, grid, dtype=torch.uint8)
    if "zeros" in parts:
        made["zeros"] = torch.randint(0, 15, grid, dtype=torch.uint8)
    if "factors" in parts:
        made["factors"] = torch.rand(*leading, outs, 1) + 0.5
    if "order" in parts:
        made["order"] = torch.randperm(ins)[None].to(torch.int32)
    return PackedTensor(packing, made).to(DEVICE)  # type: ignore[return-value]


def plain(weight: PackedTensor) -> tuple[Packing, Parts]:
    assert isinstance(weight.packing, Packing)
    return weight.packing, weight.parts


def assert_alike(made: Tensor, wanted: Tensor) -> None:
    assert made.shape == wanted.shape
    assert torch.linalg.vector_norm(made - wanted) < 1e-5 * torch.linalg.vector_norm(wanted)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, 70, DEQUANTISED_ROWS + 1])
def test_products_by_one_matrix(kind: str, count: int) -> None:
    weight = drawn(kind)
    rows = torch.randn(count, weight.shape[1], device=DEVICE)
    bias = torch.randn(weight.shape[0], device=DEVICE)
    assert takes(*plain(weight))
    wanted = rows @ weight.dequantised().t() + bias
    assert_alike(packed_product(rows, *plain(weight), bias=bias), wanted)


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if "tile" in kind])
def test_a_row_alone_in_parts(kind: str, splits: int) -> None:
    weight = drawn(kind)
    rows = torch.randn(1, weight.shape[1], device=DEVICE)
    wanted = rows @ weight.dequantised().t()
    assert_alike(packed_product(rows, *plain(weight), splits=splits), wanted)


@pytest.mark.parametrize("size", [1e-15, 1e15])
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_alone_of_any_size(kind: str, size: float) -> None:
    weight = drawn(kind)
    rows = size * torch.randn(1, weight.shape[1], device=DEVICE)
    wanted = rows.double() @ weight.dequantised().double().t()
    assert_alike(packed_product(rows, *plain(weight)).double(), wanted)


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize(("kind", "known"), [("uint4, zeros", WORDS), ("uint8, zeros", BYTES)])
def test_every_tile_of_a_sum_in_parts(
    kind: str, known: tuple[tuple[packed.Tiles, ...], ...], splits: int
) -> None:
    weight = drawn(kind)
    rows = torch.randn(5, weight.shape[1], device=DEVICE)
    bias = torch.randn(weight.shape[0], device=DEVICE)
    wanted = rows @ weight.dequantised().t() + bias
    for tiles in (ALONE, *(each for size in known for each in size)):
        made = packed_product(rows, *plain(weight), bias=bias, tiles=tiles, splits=splits)
        assert_alike(made, wanted)


@pytest.mark.parametrize("tokens", [1, 9])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "ordered"])
def test_products_by_experts(kind: str, tokens: int) -> None:
    """Each pair's row by its expert's matrix, and the products back in the tokens' order."""
    each, experts = 2, 5
    weight = drawn(kind, experts)
    chosen = torch.rand(tokens, experts).topk(each).indices.to(DEVICE)
    chosen[chosen == 4] = 3  # an expert without a row
    groups = group(chosen, experts)
    order = groups.order.long()
    sent = chosen.reshape(-1)[order]
    shares = torch.rand(tokens * each, device=DEVICE)
    numbers = weight.dequantised()
    rows = torch.randn(tokens, weight.shape[2], device=DEVICE)
    wanted = torch.einsum("pi,poi->po", rows[order // each], numbers[sent])
    given = grouped_gemm.grouped_product(rows, weight, None, groups, spread=True, transposed=False)
    assert_alike(given, wanted)
    rows = torch.randn(tokens * each, weight.shape[2], device=DEVICE)
    wanted = torch.einsum("pi,poi->po", rows, numbers[sent])
    wanted = torch.empty_like(wanted).index_copy_(0, order, wanted) * shares[:, None]
    given = packed_product(rows, *plain(weight), groups, shares=shares)
    assert_alike(given, wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_as_they_are_stored(kind: str) -> None:
    weight = drawn(kind)
    packing, parts = plain(weight)
    stored = {name: part for name, part in parts.items() if name != "order"}
    assert_alike(
        dequantised(packing, parts, torch.float32), packing.dequantise(stored, torch.float32)
    )


@pytest.mark.parametrize("kind", sorted(AFFINE))
def test_blocks_of_gguf_in_the_layout_that_is_multiplied(kind: str) -> None:
    stored = blocks(kind).to(torch.bfloat16)
    held = operand_of(stored, torch.device("cuda"))  # type: ignore[arg-type]
    sizes = operand_of(stored.to("meta"), torch.device("cuda"))  # type: ignore[arg-type]
    assert sizes.held_bytes == held.held_bytes
    assert takes(*plain(held))
    right = blocks(kind).dequantised()
    apart = held.packing.dequantise(held.parts, torch.float32) - right
    assert torch.linalg.vector_norm(apart) < 0.005 * torch.linalg.vector_norm(right)


def test_groups_of_one_number_keep_it() -> None:
    """A scale of zero, and one far below the least number."""
    stored = blocks("Q4_1")
    halves = stored.parts["codes"].view(*stored.parts["codes"].shape[:-1], -1, 20)
    scales = halves[..., :2].contiguous().view(torch.float16)
    scales[0, 0], scales[0, 1] = 0.0, 1e-7
    halves[..., :2] = scales.view(torch.uint8)
    right = stored.dequantised()
    assert torch.isfinite(right).all()
    held = operand_of(stored.to(torch.bfloat16), torch.device("cuda"))  # type: ignore[arg-type]
    made = held.packing.dequantise(held.parts, torch.float32)
    assert (made - right)[0].abs().max() < 0.005 * right[0].abs().max()


@pytest.mark.parametrize(
    "weight",
    [
        PackedTensor(
            Packing(code="uint4", columns=24),
            {"codes": torch.zeros(4, 24, dtype=torch.uint8), "scales": torch.ones(4, 2)},
        ),
        PackedTensor(
            Packing(code="uint4", columns=32),
            {
                "codes": torch.zeros(4, 32, dtype=torch.uint8),
                "scales": torch.ones(4, 2),
                "order": torch.arange(64, dtype=torch.int32).expand(2, 64),
            },
        ),
        PackedTensor(
            Packing(code="float8_e4m3", rows=4, columns=16),
            {
                "codes": torch.zeros(4, 16, dtype=torch.uint8).view(torch.float8_e4m3fn),
                "scales": torch.full((1, 1), 2 * SCALE_MAX),
            },
        ),
    ],
    ids=["groups that no tile holds", "several orders", "a scale too large"],
)
def test_others_are_dequantised(weight: PackedTensor) -> None:
    assert not takes(*plain(weight))
    linear = nn.Linear(weight.shape[1], weight.shape[0], device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    assert multiply_packed(linear, packed) == 0
    assert not is_multiplied(linear)


def test_codes_without_a_branch_in_the_kernel_are_dequantised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parts = {"codes": torch.zeros(4, 32, dtype=torch.uint8), "scales": torch.ones(4, 1)}
    assert takes(Packing(code="uint4", columns=64), parts)
    monkeypatch.setitem(CODES, "nf4", CODES["uint4"])
    assert not takes(Packing(code="nf4", columns=64), parts)


class _Wrong:
    """A kernel that forgets the zero points."""

    takes = staticmethod(takes)

    @staticmethod
    def packed_product(rows: Tensor, packing: Packing, parts: Parts) -> Tensor:
        left = {name: part for name, part in parts.items() if name != "zeros"}
        return packed_product(rows, packing, left)


def test_a_kernel_that_errs_is_not_used() -> None:
    linear = nn.Linear(192, 40, bias=False, device="meta")
    linear.weight = nn.Parameter(drawn("uint4, zeros"), requires_grad=False)
    assert multiply_packed(linear, _Wrong()) == 0
    assert multiply_packed(linear, packed) == 1
    assert is_multiplied(linear)


def engine_of(directory: Path, *, kernels: bool) -> Engine:
    config = EngineConfig(
        store=WeightStore.open(str(directory)), name="tiny", device=str(DEVICE), kernels=False,
        memory_bytes=32 << 20,
    )  # fmt: skip
    engine = Engine(config)
    if kernels:
        engine._experts = grouped_gemm
        engine.loaded.forward._kernels = RowsKernels(
            norm_rows, rotate_heads, choose_experts, gate_rows, packed, write_rows
        )
    engine.load(0, engine.spec.layers)
    return engine


@pytest.mark.parametrize(
    ("family", "packed"),
    [
        ("qwen3_moe", "fp8"),
        ("gpt_oss", "mxfp4"),
        ("llama", "compressed-tensors, int4"),
    ],
)
def test_answers_are_the_same(family: str, packed: str, tmp_path: Path) -> None:
    make(tmp_path / "plain", family, hidden_size=64, intermediate_size=64, num_hidden_layers=2)
    write(tmp_path / "plain", FORMATS[packed], tmp_path / "packed")
    expected = answers(engine_of(tmp_path / "packed", kernels=False), PROMPTS[:4], 4)
    engine = engine_of(tmp_path / "packed", kernels=True)
    for layer in engine.loaded.layers.values():
        kept = [module for module in layer.modules() if hasattr(module, "_apply_gate")]
        assert all(module.config._experts_implementation == OURS for module in kept)
        held = [each for each in layer.parameters() if isinstance(each, PackedTensor)]
        assert held
        assert all(plain(each)[0].multiply is not None for each in held)
    assert answers(engine, PROMPTS[:4], 4) == expected
