"""Blocks of GGUF files: the numbers of the ``gguf`` package, bit for bit, and rows that move."""

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from node.packed.ggml import AFFINE, HALVES, MULTIPLE, BlockPacking, by_name, ggml_rules
from node.packed.stored import read_names
from node.packed.tensor import PackedTensor
from node.weights.safetensors_header import TensorEntry

PACKED = sorted(name for name, (_, numbers, _) in by_name().items() if numbers > 1)
ROWS, BLOCKS = 6, 2


def tensor_of(kind: str, *leading: int, seed: int = 0) -> PackedTensor:
    """Random blocks; their numbers may be anything, also NaN."""
    block_bytes = by_name()[kind][2]
    generator = torch.Generator().manual_seed(seed)
    shape = (*leading, ROWS, BLOCKS * block_bytes)
    codes = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    return PackedTensor(BlockPacking(kind=kind), {"codes": codes})


def meant(packed: PackedTensor) -> torch.Tensor:
    assert isinstance(packed.packing, BlockPacking)
    with np.errstate(all="ignore"):
        made = gguf.quants.dequantize(packed.parts["codes"].numpy(), Kind[packed.packing.kind])
    return torch.from_numpy(made)


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", PACKED)
def test_blocks_mean_what_the_package_says(kind: str) -> None:
    packed = tensor_of(kind)
    right = meant(packed)
    assert packed.shape == right.shape
    assert equal(packed.dequantised(), right)
    assert torch.isfinite(right).any()


@pytest.mark.parametrize("kind", sorted(AFFINE))
def test_steps_of_one_size_are_the_same_numbers(kind: str) -> None:
    packed = tensor_of(kind)
    codes = packed.parts["codes"].view(-1, by_name()[kind][2])
    for place in HALVES.get(kind, ()):
        codes[:, place + 1] &= 0x7B  # finite
    if kind == "MXFP4":
        codes[:, 0] &= 0x7F  # exponents below one
    affine = packed.packing.affine(packed.parts)
    assert affine is not None
    assert int(affine.codes.max()) < 1 << affine.bits
    groups = torch.unflatten(affine.codes.double(), -1, (-1, affine.columns))
    made = groups * affine.scales[..., None] + affine.least[..., None]
    assert torch.allclose(made.flatten(-2).float(), meant(packed), rtol=1e-6, atol=1e-4)


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_0"])
def test_what_moves_rows_stays_packed(kind: str) -> None:
    packed, other = tensor_of(kind), tensor_of(kind, seed=1)
    right, more = meant(packed), meant(other)
    order = torch.tensor([5, 0, 3])
    places = torch.randperm(right.shape[1])
    made = {
        "rows": (packed[order], right[order]),
        "a range": (packed[2:5], right[2:5]),
        "columns": (packed[:, places], right[:, places]),
        "columns again": (packed[:, places][:, places], right[:, places][:, places]),
        "joined": (torch.cat([packed, other]), torch.cat([right, more])),
        "stacked": (torch.stack([packed, other]), torch.stack([right, more])),
        "expert": (torch.stack([packed, other])[1], more),
        "turned": (packed.t(), right.t()),
    }
    for name, (got, wanted) in made.items():
        assert isinstance(got, PackedTensor), name
        assert got.shape == wanted.shape, name
        assert equal(got.dequantised(), wanted), name


def test_rows_that_share_scales_do_not_move_packed() -> None:
    from node.packed.packing import Packing

    parts = {"codes": torch.zeros(4, 8, dtype=torch.int8), "scales": torch.ones(2, 1)}
    packed = PackedTensor(Packing(code="int8", rows=2, columns=8), parts)
    assert not isinstance(packed[torch.tensor([1, 0])], PackedTensor)
    assert not isinstance(packed[1:3], PackedTensor)


def test_a_product_with_moved_columns_is_that_of_the_numbers() -> None:
    packed = tensor_of("Q8_0").made_up()
    places = torch.randperm(packed.shape[1])
    right = packed.dequantised()[:, places]
    rows = torch.randn(3, packed.shape[1])
    product = torch.nn.functional.linear(rows, packed[:, places])
    assert torch.allclose(product, rows @ right.t(), atol=1e-5)
    ids = torch.tensor([2, 0])
    assert torch.equal(torch.nn.functional.embedding(ids, packed[:, places]), right[ids])


def test_products_and_lookups_are_those_of_the_numbers() -> None:
    numbers = np.random.default_rng(0).normal(size=(40, 64)).astype(np.float32)
    codes = torch.from_numpy(gguf.quants.quantize(numbers, Kind.Q8_0))
    packed = PackedTensor(BlockPacking(kind="Q8_0"), {"codes": codes})
    right = meant(packed)
    rows = torch.randn(3, 64)
    product = torch.nn.functional.linear(rows, packed)
    assert torch.allclose(product, rows @ right.t(), atol=1e-5)
    ids = torch.tensor([[7, 0], [39, 7]])
    assert torch.equal(torch.nn.functional.embedding(ids, packed), right[ids])


def test_infinities_are_found_in_the_dtype_that_computes() -> None:
    numbers = np.full((2, 32), 40_000.0, dtype=np.float32)
    codes = torch.from_numpy(gguf.quants.quantize(numbers, Kind.Q8_0))
    fits = PackedTensor(BlockPacking(kind="Q8_0"), {"codes": codes})
    assert fits.is_finite
    assert fits.to(torch.float16).is_finite
    codes[:, :2] = torch.tensor([1000.0]).half().view(torch.uint8)
    assert fits.is_finite
    assert not fits.to(torch.float16).is_finite
    codes[1, :2] = torch.tensor([float("nan")]).half().view(torch.uint8)
    assert not fits.is_finite


@pytest.mark.parametrize("kind", sorted(HALVES))
def test_numbers_are_bounded_by_the_float16_in_their_blocks(kind: str) -> None:
    packed = tensor_of(kind, 50)
    blocks = packed.parts["codes"].view(-1, by_name()[kind][2])
    for place in HALVES[kind]:
        blocks[:, place : place + 2] = torch.tensor([8.0]).half().view(torch.uint8)
    largest = packed.dequantised().abs().max()
    assert 8 <= largest <= 8 * MULTIPLE * len(HALVES[kind])
    assert packed.is_finite
    assert packed.to(torch.float16).is_finite == bool(largest <= 65504)
    for place in HALVES[kind]:
        before = blocks[3, place : place + 2].clone()
        blocks[3, place : place + 2] = torch.tensor([float("inf")]).half().view(torch.uint8)
        assert not packed.is_finite
        assert not torch.isfinite(packed.dequantised()).all()
        blocks[3, place : place + 2] = before


@pytest.mark.parametrize("kind", PACKED)
def test_made_up_blocks_are_small_numbers(kind: str) -> None:
    made = tensor_of(kind).made_up()
    assert made.parts["codes"].shape == tensor_of(kind).parts["codes"].shape
    assert made.dequantised().abs().max() < 10


def test_weights_are_tensors_under_their_names() -> None:
    entries = {
        "a": TensorEntry(shard="s", dtype="Q4_0", shape=(3, 36), begin=0, end=108),
        "b": TensorEntry(shard="s", dtype="F32", shape=(3,), begin=108, end=120),
    }
    found = read_names("m", entries, ggml_rules())
    on_meta = found["a"].on_meta(entries)
    assert isinstance(on_meta, PackedTensor)
    assert (tuple(on_meta.shape), on_meta.held_bytes) == ((3, 64), 108)
    assert found["b"].make is None
    with pytest.raises(ValueError, match="rows of 35 bytes in Q4_0"):
        PackedTensor(BlockPacking(kind="Q4_0"), {"codes": torch.zeros(3, 35, dtype=torch.uint8)})
