"""Numbers of packed matrices, as their formats define them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from node.packed.packing import BYTES, CODES, Packing, Parts
from tests.examples import examples

KINDS = [*CODES, *BYTES]


def drawn(code: str, outs: int, ins: int, packing: Packing, seed: int) -> dict[str, torch.Tensor]:
    """Random parts without codes of NaN."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (outs, ins * packing.bits // 8), generator=generator)
    if code.startswith("float8"):
        codes &= 0xF7 if code == "float8_e4m3" else 0xFB
    codes = codes.to(torch.uint8).view(BYTES.get(code, torch.uint8))
    grid = (-(-outs // packing.rows), -(-ins // packing.columns))
    return {"codes": codes, "scales": torch.rand(grid, generator=generator) + 0.1}


def one_by_one(packing: Packing, parts: Parts) -> torch.Tensor:
    """The definition, number by number."""
    outs, ins = packing.shape(parts)
    made = torch.empty(outs, ins)
    for row in range(outs):
        for column in range(ins):
            place = column
            if "order" in parts:
                bands = parts["order"].shape[0]
                place = int(parts["order"][row * bands // outs, column])
            if packing.bits == 4:
                byte = int(parts["codes"][row, place // 2])
                value = CODES[packing.code][byte >> 4 if place % 2 else byte & 15]
                value = float(torch.tensor(value).half())
            else:
                value = float(parts["codes"][row, place])
            at = row // packing.rows, place // packing.columns
            value -= float(parts["zeros"][at]) if "zeros" in parts else 0
            factor = float(parts["factors"][row]) if "factors" in parts else 1
            made[row, column] = value * float(parts["scales"][at]) * factor
    return made


@given(
    code=st.sampled_from(KINDS),
    size=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    block=st.tuples(st.integers(1, 10), st.integers(1, 20)),
    extra=st.sets(st.sampled_from(["zeros", "factors", "order"])),
    seed=st.integers(0, 99),
)
@examples(60)
def test_numbers_are_those_of_the_definition(
    code: str, size: tuple[int, int], block: tuple[int, int], extra: set[str], seed: int
) -> None:
    outs, ins = size[0], 2 * size[1]
    packing = Packing(code=code, rows=block[0], columns=block[1])
    parts = drawn(code, outs, ins, packing, seed)
    generator = torch.Generator().manual_seed(seed)
    if "zeros" in extra:
        parts["zeros"] = torch.randint(0, 16, parts["scales"].shape, generator=generator).byte()
    if "factors" in extra:
        parts["factors"] = torch.rand(outs, 1, generator=generator)
    if "order" in extra:
        bands = 2 if outs % 2 == 0 else 1
        orders = [torch.randperm(ins, generator=generator) for _ in range(bands)]
        parts["order"] = torch.stack(orders).to(torch.int32)
    expected = one_by_one(packing, parts)
    got = packing.dequantise(parts, torch.float32)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    spread, by_row = packing.by_row(parts)
    torch.testing.assert_close(spread.dequantise(by_row, torch.float32), got)
    start = packing.rows * (outs // packing.rows // 2)
    some = packing.some_rows(parts, start, outs)
    torch.testing.assert_close(packing.dequantise(some, torch.float32), got[start:])


@pytest.mark.parametrize("code", ["float8_e4m3", "float8_e5m2"])
def test_all_floats_of_eight_bits_are_exact(code: str) -> None:
    """Also those below the normal ones."""
    codes = torch.arange(256, dtype=torch.uint8).view(BYTES[code])[None]
    finite = torch.isfinite(codes.float())
    packing = Packing(code=code, columns=256)
    got = packing.dequantise({"codes": codes, "scales": torch.ones(1, 1)}, torch.float32)
    assert torch.equal(got[finite], codes.float()[finite])


def test_bytes_as_scales_are_exponents() -> None:
    packing = Packing(code="uint8", columns=1)
    parts = {
        "codes": torch.ones(1, 3, dtype=torch.uint8),
        "scales": torch.tensor([[127, 130, 100]], dtype=torch.uint8),
    }
    assert packing.dequantise(parts, torch.float32).tolist() == [[1.0, 8.0, 2.0**-27]]


@pytest.mark.parametrize(
    ("name", "shape"),
    [("scales", (4, 2)), ("zeros", (2, 2)), ("factors", (1, 1)), ("order", (3, 8))],
)
def test_parts_that_do_not_fit_are_named(name: str, shape: tuple[int, int]) -> None:
    packing = Packing(code="uint4", rows=2, columns=8)
    parts = {"codes": torch.zeros(4, 4, dtype=torch.uint8), "scales": torch.ones(2, 1)}
    assert packing.shape(parts) == (4, 8)
    with pytest.raises(ValueError, match=r"fit|orders"):
        packing.shape({**parts, name: torch.zeros(shape)})
