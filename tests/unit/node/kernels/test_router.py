"""Routers by our kernel: the experts and scores of models' own code, and theirs where they differ.
Without a GPU the kernel is interpreted on the CPU."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig

from testing.tiny_families import make
from tests.unit.node.model.execution.test_cuda_graphs import PROMPTS, answers, engine_of

pytest.importorskip("triton", reason="Triton has no wheels for this platform")

from node.kernels import methods
from node.kernels.gate import fuse_gates
from node.kernels.methods import replaced_method
from node.kernels.router import _alike, _routing_of, fuse_routers
from node.kernels.triton.gate import gate_rows
from node.kernels.triton.router import choose_experts

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TINY = {
    "hidden_size": 32, "num_local_experts": 8, "num_experts": 8, "n_routed_experts": 8,
    "num_experts_per_tok": 3, "n_group": 1, "topk_group": 1, "num_attention_heads": 4,
    "num_hidden_layers": 2, "vocab_size": 64, "intermediate_size": 48,
}  # fmt: skip

KNOWN: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen3_moe": ("Qwen3MoeTopKRouter", {"norm_topk_prob": True}, {"normalised": True}),
    "olmoe": ("OlmoeTopKRouter", {"norm_topk_prob": False}, {"normalised": False}),
    "mixtral": ("MixtralTopKRouter", {}, {"normalised": True, "scores": torch.float32}),
    "gpt_oss": ("GptOssTopKRouter", {}, {"normalised": True}),
    "granitemoe": (
        "GraniteMoeTopKRouter",
        {},
        {"normalised": True, "logits": torch.float32, "product": None},
    ),
    "openai_privacy_filter": (
        "OpenAIPrivacyFilterTopKRouter",
        {},
        {"factor": 1 / 3, "product": torch.float32},
    ),
    "cohere2_moe": (
        "Cohere2MoeTopKRouter",
        {"expert_selection_fn": "sigmoid", "norm_topk_prob": True},
        {"softmax": False},
    ),
    "deepseek_v3": (
        "DeepseekV3TopkRouter",
        {"routed_scaling_factor": 2.5, "norm_topk_prob": True},
        {"softmax": False, "factor": 2.5, "biases": "e_score_correction_bias", "flattens": True},
    ),
}
"""Routers: their class, their configuration, and some of what they compute; None is the layer's
dtype."""
OTHERS = {
    "deepseek_v3": ("DeepseekV3TopkRouter", {"n_group": 4, "topk_group": 2}),
    "laguna": ("LagunaTopKRouter", {"moe_router_logit_softcapping": 2.0}),
    "minimax_m2": ("MiniMaxM2TopKRouter", {}),
}
"""Routers that choose groups first, cap their logits, or are handed biases."""


def router_of(family: str, name: str, dtype: torch.dtype, extra: dict[str, Any]) -> Any:
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    config = AutoConfig.for_model(family, **{**TINY, **extra})
    torch.manual_seed(3)
    made = vars(module)[name](config)
    with torch.no_grad():
        for tensor in (*made.parameters(), *made.buffers()):
            tensor.copy_(torch.randn_like(tensor) * (1 if tensor.dim() == 2 else 0.1))
    return made.to(DEVICE, dtype).eval()


def drawn(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(5)).to(DEVICE, dtype)


@pytest.mark.parametrize(
    ("count", "experts", "top"), [(1, 4, 1), (7, 60, 4), (5, 128, 8), (3, 3, 3)]
)
@pytest.mark.parametrize("softmax", [True, False], ids=["softmax", "sigmoid"])
@pytest.mark.parametrize("normalised", [True, False], ids=["normalised", ""])
@pytest.mark.parametrize("biased", [True, False], ids=["biased", ""])
def test_the_highest_scores(
    count: int, experts: int, top: int, softmax: bool, normalised: bool, biased: bool
) -> None:
    logits, biases = 2 * drawn(count, experts), drawn(experts) if biased else None
    wanted = logits.softmax(-1) if softmax else logits.sigmoid()
    chosen = (wanted if biases is None else wanted + biases).topk(top, dim=-1).indices
    wanted = wanted.gather(1, chosen)
    if normalised:
        wanted = wanted / wanted.sum(dim=-1, keepdim=True)
    scores, found = choose_experts(
        logits, biases, top, torch.float32, softmax=softmax, normalised=normalised, factor=2.5
    )
    assert torch.equal(found, chosen)
    assert (scores - 2.5 * wanted).abs().max() < 3e-6


def test_equals_and_what_is_no_number() -> None:
    """Whatever logits are, the chosen experts exist and differ."""
    logits = torch.zeros(4, 6, device=DEVICE)
    logits[1, 2:] = float("nan")
    logits[2] = float("-inf")
    logits[3, 4] = float("inf")
    for softmax in (True, False):
        scores, chosen = choose_experts(
            logits, None, 3, torch.bfloat16, softmax=softmax, normalised=True, factor=1.0
        )
        assert chosen.tolist() == [[0, 1, 2], [0, 1, 2], [0, 1, 2], [4, 0, 1]]
        assert scores.dtype is torch.bfloat16
        assert scores[0].tolist() == pytest.approx([1 / 3] * 3, rel=4e-3)
        assert scores[1].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", KNOWN)
def test_a_router_is_recognised_by_what_it_computes(
    family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, extra, told = KNOWN[family]
    router = router_of(family, name, dtype, extra)
    routing = _routing_of(router, dtype, choose_experts)
    assert routing is not None
    for part, value in told.items():
        assert getattr(routing, part) == (dtype if value is None else value)
    rows = drawn(9, 32, dtype=dtype)
    wanted = router(rows)
    layer = nn.Sequential(router)
    kind, state = type(router), list(router.state_dict())
    assert fuse_routers(layer, dtype, choose_experts) == 1
    assert fuse_routers(layer, dtype, choose_experts) == 0  # once
    assert isinstance(router, kind)
    assert list(router.state_dict()) == state
    monkeypatch.setattr(methods, "ON", DEVICE.type)
    shapes = (rows, rows[None]) if routing.flattens else (rows,)
    for given in shapes:
        made = router(given)
        assert _alike(made, wanted)
        assert torch.equal(made[0], wanted[0])
        if dtype is torch.float32:  # no two logits are equal
            by_expert = torch.zeros(9, 8, device=DEVICE)
            apart = by_expert.scatter(1, made[2], made[1]) - by_expert.scatter(
                1, wanted[2], wanted[1]
            )
            assert apart.abs().max() < 3e-6 * routing.factor


@pytest.mark.parametrize("family", OTHERS)
def test_other_routers_are_left_alone(family: str) -> None:
    name, extra = OTHERS[family]
    router = router_of(family, name, torch.float32, extra)
    assert fuse_routers(nn.Sequential(router), torch.float32, choose_experts) == 0
    assert replaced_method(router) is None


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_answers_are_the_same(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With routers and gates by our kernels."""
    make(tmp_path, family, num_hidden_layers=2)
    engine = engine_of(tmp_path, str(DEVICE))
    expected = answers(engine, PROMPTS[:2], 3)
    for layer in engine.loaded.layers.values():
        assert fuse_routers(layer, torch.float32, choose_experts) == 1
        assert fuse_gates(layer, torch.float32, DEVICE, gate_rows) >= 1
    monkeypatch.setattr(methods, "ON", DEVICE.type)
    assert answers(engine, PROMPTS[:2], 3) == expected


class Linear(nn.Linear):
    """Has a matrix, and chooses nothing."""

    top_k = 2


def test_what_only_looks_like_a_router_is_left_alone() -> None:
    router = router_of("qwen3_moe", "Qwen3MoeTopKRouter", torch.float32, {})
    same = nn.Sequential(Linear(8, 4).to(DEVICE), nn.Linear(8, 4))
    assert fuse_routers(same, torch.float32, choose_experts) == 0
    router.weight.data.zero_()
    assert fuse_routers(router, torch.float32, choose_experts) == 0


def test_a_kernel_that_errs_or_fails_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    def skewed(*given: Any, **named: Any) -> tuple[Tensor, Tensor]:
        scores, chosen = choose_experts(*given, **named)
        return scores * 1.001, chosen

    def shifted(*given: Any, **named: Any) -> tuple[Tensor, Tensor]:
        scores, chosen = choose_experts(*given, **named)
        return scores, chosen + 1

    def swapped(*given: Any, **named: Any) -> tuple[Tensor, Tensor]:
        scores, chosen = choose_experts(*given, **named)
        return scores, chosen.flip(1)

    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no C compiler\nand much more")

    router = router_of("qwen3_moe", "Qwen3MoeTopKRouter", torch.float32, {})
    for kernel in (skewed, shifted, swapped, fails):
        assert fuse_routers(router, torch.float32, kernel) == 0
    assert caplog.text.count("routers run by torch: its kernel failed: no C compiler") == 1


def test_what_the_kernel_does_not_take_goes_the_old_way(monkeypatch: pytest.MonkeyPatch) -> None:
    router = router_of("qwen3_moe", "Qwen3MoeTopKRouter", torch.float32, {})
    ran: list[int] = []

    def counted(*given: Any, **named: Any) -> tuple[Tensor, Tensor]:
        ran.append(1)
        return choose_experts(*given, **named)

    assert fuse_routers(router, torch.float32, counted) == 1
    ran.clear()
    monkeypatch.setattr(methods, "ON", "elsewhere")
    router(drawn(3, 32))
    monkeypatch.setattr(methods, "ON", DEVICE.type)
    router(drawn(1, 1, 3, 32))
    router.bfloat16()(drawn(3, 32, dtype=torch.bfloat16))
    assert ran == []
    router.float()(drawn(3, 32))
    assert ran == [1]
