"""Linear layers in 8 and 4 bits: size, error, and rows that do not know of each other."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from coordinator.plans.catalogue.precision import QUANTISED
from dht.errors import UserError
from dht.messages.types import in_precision_of
from node.engine.engine import Engine, EngineConfig, WorkItem
from node.model.linear.quantize import (
    BLOCK,
    held_bytes,
    quantised,
    quantize_linears,
    scaled_product,
)
from node.packed.tensor import PackedTensor
from node.weights.store import WeightStore

ERROR_MAX = {"int8": 0.02, "int4": 0.12}
"""Relative L2 error of one product with normal numbers, as published for both formats."""
SERVED_ERROR_MAX = {"int8": 0.03, "int4": 0.2}
"""The same of three products in a row, with numbers that need not be normal."""

SHAPE: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 97,
    "max_position_embeddings": 64,
}


class Block(nn.Module):
    """Two layers that are quantised, and what is not: a small one, a norm, a subclass."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(128, 256, bias=True)
        self.down = nn.Sequential(nn.Linear(256, 128, bias=False))
        self.router = nn.Linear(128, 8, bias=False)
        self.odd = nn.Linear(130, 64, bias=False)
        self.norm = nn.LayerNorm(128)
        self.kept = nn.modules.linear.NonDynamicallyQuantizableLinear(128, 128)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(self.down(self.up(rows)))
        return out


def made(dtype: torch.dtype) -> Block:
    torch.manual_seed(0)
    return Block().to(dtype).eval().requires_grad_(False)


def size_bytes(module: nn.Module) -> int:
    tensors = [*(p.data for p in module.parameters()), *module.buffers()]
    states = [p.quant_state.absmax for p in module.parameters() if hasattr(p, "quant_state")]
    return sum(
        t.held_bytes if isinstance(t, PackedTensor) else t.numel() * t.element_size()
        for t in [*tensors, *states]
    )


@pytest.mark.parametrize("kind", QUANTISED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_linear_layers_shrink_and_err_as_published(kind: str, dtype: torch.dtype) -> None:
    right, block = made(dtype), made(dtype)
    with torch.device("meta"):
        on_meta = Block()
    expected_bytes = held_bytes(on_meta, kind, dtype)
    quantize_linears(block, kind)
    assert size_bytes(block) == expected_bytes
    assert expected_bytes < held_bytes(on_meta, None, dtype) == size_bytes(right)
    unchanged = ["router", "norm", "kept"] + (["odd"] if kind == "int4" else [])
    assert all(type(getattr(block, n)) is type(getattr(right, n)) for n in unchanged)
    rows = torch.randn(2, 7, 128, generator=torch.Generator().manual_seed(1)).to(dtype)
    with torch.inference_mode():
        for part, width in (("up", 128), ("down", 256)):
            given = torch.randn(5, width, generator=torch.Generator().manual_seed(2)).to(dtype)
            wanted = getattr(right, part)(given).float()
            got = getattr(block, part)(given).float()
            assert (got - wanted).norm() < ERROR_MAX[kind] * wanted.norm()
        out = block(rows)
        assert out.dtype == dtype
        assert out.shape == rows.shape
        alone = block(rows[1:, 3:4])
        if kind == "int8":
            assert torch.equal(alone, out[1:, 3:4])
        else:  # float products of one row and of many add up in another order on some processors
            torch.testing.assert_close(alone, out[1:, 3:4])


SHIFTS = {"around zero": 0.0, "above zero": 4.0, "below zero": -4.0, "mostly above": 1.0}
"""What is added to normal numbers: zero points from 0 to 15."""


def steps(weight: torch.Tensor) -> torch.Tensor:
    """Size of one of 15 steps from the least to the largest of each group, zero among them."""
    groups = weight.unflatten(-1, (-1, BLOCK))
    least, most = groups.amin(-1).clamp_max(0), groups.amax(-1).clamp_min(0)
    return ((most - least) / 15).repeat_interleave(BLOCK, dim=-1)


@pytest.mark.parametrize("shift", list(SHIFTS))
@pytest.mark.parametrize("shape", [(96, 128), (3, 32, 192)], ids=["linear", "experts"])
def test_four_bits_err_by_half_a_step_wherever_zero_lies(
    shape: tuple[int, ...], shift: str
) -> None:
    """Of the packed tensors that are served: each number becomes the nearest step."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(3)) + SHIFTS[shift]
    packed = quantised(weight, "int4", torch.device("cpu")).dequantised().float()
    error, step = (packed - weight).abs(), steps(weight)
    assert (error <= 0.56 * step).all()  # scales are bfloat16: 15 steps are 0.03 of one off
    assert error.square().mean().sqrt() < 0.32 * step.mean()  # 1 / sqrt(12) of a step
    assert abs((packed - weight).mean()) < 0.03 * step.mean(), "no side is preferred"


def test_four_bits_keep_zeros_and_what_lies_on_steps() -> None:
    codes = torch.randint(0, 16, (32, 128), generator=torch.Generator().manual_seed(4)).float()
    codes[:, ::BLOCK], codes[:, 1::BLOCK] = 0, 15  # each group reaches both ends
    for zero in range(16):
        weight = (codes - zero) * 0.25
        packed = quantised(weight, "int4", torch.device("cpu"))
        assert torch.equal(packed.dequantised().float(), weight)
        assert torch.equal(packed.parts["zeros"], torch.full((32, 2), zero, dtype=torch.uint8))


@pytest.mark.parametrize("kind", QUANTISED)
@pytest.mark.parametrize("shift", list(SHIFTS))
def test_products_of_what_is_served_err_as_published(kind: str, shift: str, tmp_path: Path) -> None:
    """Through an engine, as ``--quantize`` serves it."""
    config = AutoConfig.for_model("llama", **SHAPE)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.down_proj.weight.add_(0.02 * SHIFTS[shift])
    model.save_pretrained(tmp_path)
    store = WeightStore.open(str(tmp_path))
    engine = Engine(EngineConfig(store=store, name="tiny", memory_bytes=64 << 20, quantize=kind))
    engine.load(0, 4)
    right = model.model.layers[1].mlp
    served: Any = engine.loaded.layers[1]
    rows = torch.randn(32, 128, generator=torch.Generator().manual_seed(5))
    with torch.inference_mode():
        wanted, got = right(rows), served.mlp(rows).float()
    assert (got - wanted).norm() < SERVED_ERROR_MAX[kind] * wanted.norm()


@pytest.mark.parametrize("kind", QUANTISED)
def test_extreme_rows_stay_finite(kind: str) -> None:
    block = quantize_linears(made(torch.bfloat16), kind)
    rows = torch.stack([torch.zeros(128), torch.full((128,), 1e5), torch.full((128,), 1e-20)])
    with torch.inference_mode():
        assert torch.isfinite(block(rows.to(torch.bfloat16))).all()


def test_without_the_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="pip install bitsandbytes"):
        quantize_linears(made(torch.float32), "int8")


@pytest.mark.parametrize("kind", QUANTISED)
def test_an_engine_holds_what_its_spec_promises(kind: str, tmp_path: Path) -> None:
    config = AutoConfig.for_model("llama", **SHAPE)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)

    def engine_of(quantize: str | None, memory_bytes: int = 64 << 20) -> Engine:
        store = WeightStore.open(str(tmp_path))
        return Engine(
            EngineConfig(store=store, name="tiny", memory_bytes=memory_bytes, quantize=quantize)
        )

    whole, packed = engine_of(None), engine_of(kind)
    assert packed.spec.fingerprint == whole.spec.fingerprint
    assert packed.spec == in_precision_of(whole.spec, packed.spec)
    packed.load(0, 4)
    layers = [packed.loaded.layers[index] for index in range(4)]
    assert {size_bytes(layer) for layer in layers} == {packed.spec.layer_bytes}
    assert engine_of(kind, 2 << 20).layers_max > engine_of(None, 2 << 20).layers_max
    assert next(layers[0].parameters()).device == packed.device
    before = packed.config.store.bytes_read
    packed.load(1, 4)
    assert packed.config.store.bytes_read - before <= 4 * 128 * 97  # layers stay, quantised
    assert all(packed.loaded.layers[index] is layers[index] for index in range(1, 4))
    item = WorkItem(session="s", start=1, end=3, position=0, hidden=torch.randn(5, 128))
    assert packed.kv.reserve("s", 5) is None
    result = packed.step([item])[0]
    assert result.hidden is not None
    assert torch.isfinite(result.hidden).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("biased", [True, False])
def test_products_as_on_a_gpu_are_exact_and_may_be_large(dtype: torch.dtype, biased: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    rows, weight = (
        torch.randint(-127, 128, shape, generator=generator, dtype=torch.int8)
        for shape in ((5, 64), (96, 64))
    )
    absmax = 1e4 * torch.rand(5, generator=generator), torch.rand(96, generator=generator)
    bias = torch.randn(96, generator=generator).to(dtype) if biased else None
    quantize_linears(Block(), "int8")  # loads the library
    exact = (rows.double() @ weight.double().T) * absmax[0][:, None] * absmax[1] / 127**2
    expected = exact if bias is None else exact + bias.double()
    out = scaled_product(rows, weight, *absmax, bias, dtype)
    assert out.dtype is dtype
    assert out.abs().max() > torch.finfo(torch.float16).max / 4
    error = (out.double() - expected).abs().max() / expected.abs().max()
    assert error < (1e-6 if dtype is torch.float32 else 1e-2)
