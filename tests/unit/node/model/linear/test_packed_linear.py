"""Matrices in another layout: the same numbers come out, whatever the rows."""

import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from node.device import products
from node.model.linear import packed_linear
from node.model.linear.packed_linear import PackedLinear, favour_few_rows

needs_bfloat16 = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(),
    reason="this processor packs no matrices in bfloat16",
)


class Shouting(nn.Linear):
    """Computes something of its own."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(rows)


@pytest.fixture(autouse=True)
def _small_ones_too(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(packed_linear, "NUMBERS_LEAST", 1)
    packed_linear._can_pack.cache_clear()
    yield
    packed_linear._can_pack.cache_clear()


@pytest.mark.parametrize(
    ("dtype", "error"),
    [(torch.float32, 1e-5), pytest.param(torch.bfloat16, 2e-2, marks=needs_bfloat16)],
)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("outputs", "inputs"), [(33, 70), (128, 64), (1, 5), (64, 129)])
def test_products_are_the_same(
    dtype: torch.dtype,
    error: float,
    bias: bool,
    outputs: int,
    inputs: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(packed_linear, "_is_quicker", lambda dtype: True)
    torch.manual_seed(outputs)
    linear = nn.Linear(inputs, outputs, bias=bias, dtype=dtype).requires_grad_(False)
    packed = favour_few_rows(linear)
    assert isinstance(packed, PackedLinear)
    for shape in ((1, inputs), (1, 3, inputs), (1, 40, inputs), (300, inputs)):
        rows = torch.randn(shape).to(dtype)
        with torch.inference_mode():
            torch.testing.assert_close(packed(rows), linear(rows), atol=error, rtol=error)
            apart = rows.transpose(0, -1).contiguous().transpose(0, -1)  # not in order
            torch.testing.assert_close(packed(apart), linear(rows), atol=error, rtol=error)


def test_what_is_within_is_replaced_and_what_computes_otherwise_is_not() -> None:
    module = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.ModuleList([nn.Linear(8, 4)])})
    module["c"], module["d"] = Shouting(8, 8), nn.Linear(8, 8, dtype=torch.float16)
    assert favour_few_rows(module) is module
    kinds = [type(part) for part in (module["a"], module["b"][0], module["c"], module["d"])]
    assert kinds == [PackedLinear, PackedLinear, Shouting, nn.Linear]
    assert module["a"].weight.dtype is torch.float32
    assert tuple(module["a"].weight.shape) == (8, 8)


def test_without_onednn_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_linear, "_packed", lambda weight: weight.to("nowhere"))
    linear = nn.Linear(8, 8)
    assert favour_few_rows(linear) is linear


@needs_bfloat16
@pytest.mark.parametrize(("packed_s", "kind"), [(0.5, PackedLinear), (2.0, nn.Linear)])
def test_matrices_in_bfloat16_are_packed_where_that_is_quicker(
    packed_s: float, kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    took_s = itertools.cycle([0.0, 1.0, 0.0, packed_s])  # from a start to an end, by turns
    monkeypatch.setattr(products.time, "perf_counter", lambda: next(took_s))
    linear = nn.Linear(8, 8, dtype=torch.bfloat16)
    assert type(favour_few_rows(linear)) is kind
    assert isinstance(favour_few_rows(nn.Linear(8, 8)), PackedLinear)


def test_a_processor_without_bfloat16_is_no_fault(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    linear = nn.Linear(8, 8, dtype=torch.bfloat16)
    assert favour_few_rows(linear) is linear
    assert not caplog.records


def test_small_matrices_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_linear, "NUMBERS_LEAST", 65)
    small, large = nn.Linear(8, 8), nn.Linear(8, 9)
    assert favour_few_rows(small) is small
    assert isinstance(favour_few_rows(large), PackedLinear)
