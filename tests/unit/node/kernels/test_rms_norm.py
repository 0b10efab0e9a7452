"""RMS norms by torch's fused one: the same numbers, and nothing else is replaced."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from node.kernels.rms_norm import FusedNorm, fuse_norms
from node.model.layer_range import LoadedRange, ModelLayout
from node.weights.store import WeightStore
from testing.tiny_families import FAMILIES, make

NORMS = {
    "llama": 2, "qwen3": 4, "gemma2": 4, "gemma3": 6, "gpt_oss": 2, "deepseek_v3": 4,
    "olmo2": 4, "granite": 2, "gpt_neox": 0, "gpt2": 0,
}  # fmt: skip


def layers_of(directory: Path, family: str, dtype: str) -> list[nn.Module]:
    make(directory, family)
    layout = ModelLayout.of(WeightStore.open(str(directory)), dtype)
    loaded = LoadedRange(layout, torch.device("cpu"))
    loaded.set(0, 2)
    return list(loaded.layers.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("family", "count"), NORMS.items())
def test_norms_give_the_same(family: str, count: int, dtype: str, tmp_path: Path) -> None:
    assert family in FAMILIES
    for layer in layers_of(tmp_path, family, dtype):
        for parameter in layer.parameters():  # norms of ones would hide how they are applied
            if parameter.dim() == 1:
                parameter.data.add_(0.3 * torch.randn_like(parameter))
        before = dict(layer.named_modules())
        assert fuse_norms(layer, next(layer.parameters()).dtype) == count
        assert fuse_norms(layer, next(layer.parameters()).dtype) == 0
        kinds: Counter[str] = Counter()
        for name, module in layer.named_modules():
            if isinstance(module, FusedNorm):
                kinds["shifted" if module.scale is not None else "plain"] += 1
                rows = 5 * torch.randn(1, 7, module.weight.shape[0]).to(module.weight.dtype)
                given, wanted = module(rows), before[name](rows)
                worst = (given - wanted).float().abs().max() / wanted.float().abs().max()
                assert worst < (1e-6 if dtype == "float32" else 0.01)
        assert set(kinds) <= {"shifted" if family.startswith("gemma") else "plain"}


class Odd(nn.Module):
    """Looks like a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))
        self.eps = 1e-6

    def forward(self, rows: torch.Tensor) -> Any:
        return rows * self.weight


class Unsteady(Odd):
    """Has an epsilon that it does not use."""

    def forward(self, rows: torch.Tensor) -> Any:
        return rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True)) * self.weight


class Two(Odd):
    """Takes something else."""

    def forward(self, rows: torch.Tensor, gate: torch.Tensor) -> Any:
        return rows * gate


def test_what_only_looks_like_a_norm_is_left_alone() -> None:
    layer = nn.ModuleDict(
        {
            "odd": Odd(), "unsteady": Unsteady(), "two": Two(), "linear": nn.Linear(16, 16),
            "norm": nn.LayerNorm(16),
        }
    )  # fmt: skip
    assert fuse_norms(layer, torch.float32) == 0
