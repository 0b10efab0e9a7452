"""Norms and rotations by our kernels: the same numbers, and the model's own where they differ.
Without a GPU the kernels are interpreted on the CPU."""

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton", reason="Triton has no wheels for this platform")

from node.kernels import rms_norm, rotary
from node.kernels.rms_norm import FusedNorm, fuse_norms
from node.kernels.rotary import NAME, FusedRotation, fuse_rotation
from node.kernels.triton.rms_norm import norm_rows
from node.kernels.triton.rotary import rotate_heads

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def drawn(*size: int) -> Tensor:
    return torch.randn(*size).to(DEVICE)


@pytest.mark.parametrize("width", [16, 100, 4096])
@pytest.mark.parametrize("layout", ["rows", "one", "heads", "part of wider rows", "turned"])
def test_norms_of_any_layout(width: int, layout: str) -> None:
    rows = {
        "rows": lambda: drawn(1, 7, width),
        "one": lambda: drawn(1, width),
        "heads": lambda: drawn(1, 5, 3, width),
        "part of wider rows": lambda: drawn(1, 5, 3 * width + 8)[..., : 3 * width].view(
            1, 5, 3, width
        ),
        "turned": lambda: drawn(1, 3, width, 5).transpose(2, 3),
    }[layout]()
    scale = drawn(width)
    wanted = torch.nn.functional.rms_norm(rows, (width,), scale, 1e-5)
    made = norm_rows(rows, scale, 1e-5)
    assert made.shape == rows.shape
    assert (made - wanted).abs().max() < 1e-5


@pytest.mark.parametrize("share", [1, 2], ids=["whole", "half"])
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(4, 2, 32), (7, 1, 24), (9, 9, 128)])
@pytest.mark.parametrize("turned", [True, False])
def test_rotations_of_any_layout(
    heads: int, kv_heads: int, width: int, turned: bool, share: int
) -> None:
    def heads_of(count: int) -> Tensor:
        if turned:
            return drawn(1, 5, count, width + 8)[..., :width].transpose(1, 2)
        return drawn(1, count, 5, width)

    query, key = heads_of(heads), heads_of(kv_heads)
    cos, sin = drawn(1, 5, width // share), drawn(1, 5, width // share)

    def rotated(part: Tensor) -> Tensor:
        first, second = part.chunk(2, dim=-1)
        wide = [each.repeat(1, 1, share)[:, None] for each in (cos, sin)]
        return part * wide[0] + torch.cat([-second, first], dim=-1) * wide[1]

    for made, part in zip(rotate_heads(query, key, cos, sin), (query, key), strict=True):
        assert (made - rotated(part)).abs().max() < 1e-5


FAMILIES = {"llama": {1}, "qwen3_moe": {1}, "gpt_oss": {2}, "gemma2": {1}}
OTHERS = ("glm", "cohere", "llama4")
"""Families that rotate neighbours, or by numbers with another shape."""


@pytest.fixture
def _files_as_they_were() -> Iterator[None]:
    modules = [
        importlib.import_module(f"transformers.models.{name}.modeling_{name}")
        for name in (*FAMILIES, *OTHERS)
    ]
    before = [vars(module).get(NAME) for module in modules]
    yield
    for module, function in zip(modules, before, strict=True):
        if function is not None:
            vars(module)[NAME] = function


def layer_of(family: str) -> nn.Module:
    """A module of a class in the family's file."""
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    made = type("Layer", (nn.Module,), {"__module__": module.__name__})
    return made()  # type: ignore[no-any-return]


@pytest.mark.usefixtures("_files_as_they_were")
@pytest.mark.parametrize("family", [*FAMILIES, *OTHERS])
def test_a_familys_own_rotation_is_recognised_by_what_it_computes(family: str) -> None:
    layer = layer_of(family)
    fused = fuse_rotation(layer, torch.float32, DEVICE, rotate_heads)
    found = vars(importlib.import_module(type(layer).__module__)).get(NAME)
    assert fused == (family in FAMILIES)
    assert isinstance(found, FusedRotation) == (family in FAMILIES)
    if isinstance(found, FusedRotation):
        assert found._shares == FAMILIES[family]
        assert fuse_rotation(layer, torch.float32, DEVICE, rotate_heads) == 0  # once
        query, key, width = drawn(1, 4, 3, 16), drawn(1, 2, 3, 16), 16 // min(found._shares)
        cos, sin = drawn(1, 3, width), drawn(1, 3, width)
        for made, wanted in zip(
            found(query, key, cos, sin), found._theirs(query, key, cos, sin), strict=True
        ):
            assert torch.equal(made, wanted)  # what is not for the kernel goes the old way


@pytest.mark.usefixtures("_files_as_they_were")
def test_a_kernel_that_errs_or_fails_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    def skewed(*given: Tensor) -> tuple[Tensor, Tensor]:
        query, key = rotate_heads(*given)
        return query, key * 1.05

    def fails(*_: Any) -> Any:
        raise RuntimeError("no C compiler\nand much more")

    layer = layer_of("llama")
    for kernel in (skewed, fails):
        assert fuse_rotation(layer, torch.float32, DEVICE, kernel) == 0
    assert "its kernel failed: no C compiler" in caplog.text


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + 0.3 * drawn(48))
        self.eps = 1e-5

    def forward(self, rows: Tensor) -> Tensor:
        return rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


def test_norms_go_by_the_kernel_that_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def by(kernel: Any) -> Any:
        layer = nn.Sequential(Norm())
        assert fuse_norms(layer, torch.float32, kernel) == 1
        (norm,) = layer
        assert isinstance(norm, FusedNorm)
        return norm._kernel

    assert by(norm_rows) is norm_rows
    assert by(lambda rows, scale, eps: norm_rows(rows, scale, 2 * eps)) is None
    monkeypatch.setattr(rms_norm, "WIDTH_MAX", 47)
    assert by(norm_rows) is None


def test_what_the_kernel_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half precision on a GPU, one session's worth of rows, and what was tried."""
    rotation = FusedRotation(lambda *_: None, rotate_heads)
    rotation._shares = {2}
    monkeypatch.setattr(rotary, "ON", "cpu")
    query, key = torch.zeros(1, 4, 3, 16), torch.zeros(1, 2, 3, 16)
    half = [part.to(torch.bfloat16) for part in (query, key)]
    cos = torch.zeros(1, 3, 8)
    assert rotation._takes(*half, cos, cos)
    assert not rotation._takes(query, key, cos, cos)
    assert not rotation._takes(*half, torch.zeros(1, 3, 16), torch.zeros(1, 3, 16))
    assert not rotation._takes(half[0].repeat(2, 1, 1, 1), half[1], cos, cos)
    assert not rotation._takes(half[0], half[1][..., :8], cos, cos)
