"""Mixtures of experts by our kernel: the same numbers, the same answers, refused where it errs."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from node.engine.engine import Engine
from node.kernels import moe
from node.kernels.moe import GroupedKernel
from testing.tiny_families import make
from tests.unit.node.model.execution.test_cuda_graphs import PROMPTS, answers, engine_of

pytest.importorskip("triton", reason="Triton has no wheels for this platform")

from node.kernels import experts_in_turn
from node.kernels.triton import grouped_gemm
from node.kernels.triton.grouped_gemm import FEW, MANY, SOME, tiles_for

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])
@pytest.mark.parametrize(
    ("tokens", "each", "count", "outs", "ins"),
    [(1, 1, 3, 16, 16), (5, 2, 4, 24, 40), (3, 2, 8, 33, 150), (70, 3, 5, 150, 33)],
)
@pytest.mark.parametrize("by", [grouped_gemm, experts_in_turn], ids=["kernel", "in turn"])
def test_each_row_by_its_experts_matrix(
    by: Any, tokens: int, each: int, count: int, outs: int, ins: int, transposed: bool, bias: bool
) -> None:
    generator = torch.Generator().manual_seed(3)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator).to(DEVICE)

    chosen = torch.rand(tokens, count, generator=generator).topk(each).indices.to(DEVICE)
    if tokens == 5:
        chosen[:, 0], chosen[:, 1] = 1, 3  # experts without a row
    weights = random(count, outs, ins)
    biases = random(count, outs) if bias else None
    given = weights.transpose(1, 2).contiguous() if transposed else weights
    groups = by.group(chosen, count)
    flat = chosen.reshape(-1)
    sent, order = torch.sort(flat, stable=True)
    assert groups.order.tolist() == order.tolist()
    assert list(groups.ends) == torch.bincount(flat, minlength=count).cumsum(0).tolist()
    shares = random(tokens * each)
    for rows, spread, source in (
        (random(tokens, ins), True, order // each),
        (random(tokens * each, ins), False, torch.arange(tokens * each, device=DEVICE)),
    ):
        wanted = torch.einsum("pi,poi->po", rows[source], weights[sent])
        if biases is not None:
            wanted = wanted + biases[sent]
        if not spread:
            wanted = torch.empty_like(wanted).index_copy_(0, order, wanted) * shares[:, None]
        made = by.grouped_product(
            rows,
            given,
            biases,
            groups,
            spread=spread,
            transposed=transposed,
            shares=None if spread else shares,
        )
        assert (made - wanted).abs().max() < 1e-4
        if not spread:
            summed = by.sum_each(made, each)
            assert (summed - made.view(tokens, each, outs).sum(1)).abs().max() < 1e-4


def test_the_largest_tiles_that_fit() -> None:
    """What is read once and used by few rows, then by many; and cards with little shared memory."""
    known = [tiles_for(pairs, 8, 2, 227 << 10) for pairs in (8, 128, 129, 512, 513)]
    assert known == [FEW[0], FEW[0], SOME[0], SOME[0], MANY[0]]
    for pairs in (8, 512, 5000):
        for room in (48 << 10, 99 << 10):
            assert tiles_for(pairs, 8, 2, room).shared_bytes(2) <= room
    assert tiles_for(5000, 8, 2, 99 << 10) == SOME[0]


def engine_by_kernel(directory: Path, kernel: GroupedKernel = grouped_gemm) -> Engine:
    engine = engine_of(directory, str(DEVICE))
    engine._experts = kernel
    engine.load(0, engine.spec.layers)
    return engine


def used(engine: Engine) -> list[str]:
    return [
        module.config._experts_implementation
        for layer in engine.loaded.layers.values()
        for module in layer.modules()
        if hasattr(module, "_apply_gate")
    ]


@pytest.mark.parametrize(
    "family",
    [
        "qwen3_moe",
        "gpt_oss",  # biases, transposed, gates of its own
        pytest.param("deepseek_v3", marks=pytest.mark.slow),
        pytest.param("granitemoe", marks=pytest.mark.slow),
    ],
)
def test_answers_are_the_same(family: str, tmp_path: Path) -> None:
    make(tmp_path, family, num_hidden_layers=2)
    expected = answers(engine_of(tmp_path, str(DEVICE)), PROMPTS[:4], 4)
    engine = engine_by_kernel(tmp_path)
    assert set(used(engine)) == {moe.OURS}
    assert answers(engine, PROMPTS[:4], 4) == expected


def test_layers_that_stay_keep_it(tmp_path: Path) -> None:
    make(tmp_path, "qwen3_moe", num_hidden_layers=2)
    engine = engine_by_kernel(tmp_path)
    engine.load(1, 2)
    assert used(engine) == [moe.OURS]
    engine.load(0, 2)
    assert used(engine) == [moe.OURS] * 2


def test_a_model_without_experts_is_left_alone(tmp_path: Path) -> None:
    make(tmp_path, "llama", num_hidden_layers=1)
    engine = engine_by_kernel(tmp_path)
    assert used(engine) == []


def test_a_kernel_that_errs_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make(tmp_path, "qwen3_moe", num_hidden_layers=1)
    expected = answers(engine_of(tmp_path), PROMPTS[:2], 3)

    def skewed(*given: object, **more: object) -> torch.Tensor:
        return grouped_gemm.grouped_product(*given, **more) * 1.05  # type: ignore[arg-type]

    def fails(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("no C compiler\nand much more")

    for product, told in ((skewed, "off by 0.1"), (fails, "its kernel failed: no C compiler")):
        by = grouped_gemm
        kernel = SimpleNamespace(
            group=by.group, grouped_product=product, sum_each=by.sum_each, SOME_ROWS=16
        )
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            engine = engine_by_kernel(tmp_path, kernel)
        assert set(used(engine)) == {moe.THEIRS}
        assert any(told in record.getMessage() for record in caplog.records)
        assert answers(engine, PROMPTS[:2], 3) == expected
