"""Gated activations by our kernel: the same numbers, and models' own code where they differ.
Without a GPU the kernel is interpreted on the CPU."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN

pytest.importorskip("triton", reason="Triton has no wheels for this platform")

from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Experts
from transformers.models.gemma3.modeling_gemma3 import Gemma3MLP
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nTextMLP
from transformers.models.glm4.modeling_glm4 import Glm4MLP
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.lfm2.modeling_lfm2 import Lfm2MLP
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts
from transformers.models.step3p7.modeling_step3p7 import Step3p7Experts

from node.kernels import methods
from node.kernels.gate import KNOWN, Formula, _halves, _in_turn, fuse_gates
from node.kernels.methods import replaced_method
from node.kernels.triton.gate import gate_rows
from node.model.linear.merged_linear import share_products

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SILU, GELU, QUICK = KNOWN
WIDE, INNER = 32, 40


def drawn(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(5)).to(DEVICE, dtype)


def config(act: str = "silu", **more: Any) -> Any:
    """For any of the modules."""
    return SimpleNamespace(
        hidden_size=WIDE, intermediate_size=INNER, moe_intermediate_size=INNER, hidden_act=act,
        hidden_activation=act, num_experts=3, num_local_experts=3, n_routed_experts=3,
        mlp_bias=False, _experts_implementation="eager", swiglu_alpha=1.702, swiglu_limit=7.0,
        **more,
    )  # fmt: skip


def filled(module: Any, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter) / 6)
    return module.to(DEVICE, dtype).eval()


@pytest.mark.parametrize("width", [16, 100, 1500])
@pytest.mark.parametrize("layout", ["halves", "in turn", "apart", "turned"])
@pytest.mark.parametrize("formula", [SILU, GELU, QUICK, Formula(1.702, 0.0, 7.0, 1.0)])
def test_gates_of_any_layout(width: int, layout: str, formula: Formula) -> None:
    made = 9 * drawn(1, 5, 2 * width)
    gate, up = {
        "halves": lambda: _halves(made),
        "in turn": lambda: _in_turn(made),
        "apart": lambda: (drawn(1, 5, width), 9 * drawn(1, 5, width)),
        "turned": lambda: _halves(9 * drawn(5, 1, 2 * width).transpose(0, 1)),
    }[layout]()
    g = gate.double().clamp(max=formula.limit)
    u = up.double().clamp(-formula.limit, formula.limit) + formula.shift
    wanted = g * torch.sigmoid(formula.alpha * (g + formula.cubic * g**3)) * u
    given = gate_rows(gate, up, *formula)
    assert given.shape == gate.shape
    assert given.is_contiguous()
    assert ((given - wanted).abs() / (1 + wanted.abs())).max() < 1e-5


def test_known_formulas_are_those_of_torch() -> None:
    gate, one = 5 * drawn(1, 4096), torch.ones(1, 4096, device=DEVICE)
    for formula, wanted in (
        (SILU, F.silu(gate)),
        (GELU, F.gelu(gate, approximate="tanh")),
        (QUICK, ACT2FN["quick_gelu"](gate)),
    ):
        assert (gate_rows(gate, one, *formula) - wanted).abs().max() < 1e-5


def test_what_is_no_number_stays_none() -> None:
    gate = torch.tensor([[float("nan"), 1.0, -1e30, 1e30]], device=DEVICE)
    up = torch.tensor([[1.0, float("nan"), 1.0, 1.0]], device=DEVICE)
    for limit in (math.inf, 7.0):
        given = gate_rows(gate, up, 1.0, 0.0, limit, 0.0)
        assert given.isnan().tolist() == [[True, True, False, False]]


MIXTURES = {
    "silu": (lambda: Qwen3MoeExperts(config()), SILU),
    "gelu": (lambda: Qwen3MoeExperts(config("gelu_pytorch_tanh")), GELU),
    "in turn": (lambda: GptOssExperts(config()), Formula(1.702, 0.0, 7.0, 1.0)),
    "limits": (lambda: DeepseekV4Experts(config()), Formula(1.0, 0.0, 7.0, 0.0)),
    "both": (lambda: MiniMaxM3VLExperts(config()), Formula(1.702, 0.0, 7.0, 1.0)),
}
DENSE = {
    "silu": lambda: LlamaMLP(config()),
    "gelu": lambda: Gemma3MLP(config("gelu_pytorch_tanh")),
    "quick": lambda: LlamaMLP(config("quick_gelu")),
    "joint": lambda: Glm4MLP(config()),
    "other names": lambda: Lfm2MLP(
        config(block_auto_adjust_ff_dim=False, block_ffn_dim_multiplier=1.0, block_multiple_of=1)
    ),
}


class Counted:
    """The kernel, and what it was given."""

    def __init__(self) -> None:
        self.given: list[Formula] = []

    def __call__(self, gate: Tensor, up: Tensor, *formula: float) -> Tensor:
        self.given.append(Formula(*formula))
        return gate_rows(gate, up, *formula)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", MIXTURES)
def test_a_mixtures_gate_is_recognised_by_what_it_computes(
    kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, formula = MIXTURES[kind]
    module, kernel = filled(make(), dtype), Counted()
    rows = 4 * drawn(6, 2 * INNER, dtype=dtype)
    wanted = module._apply_gate(rows)
    assert fuse_gates(nn.Sequential(module), dtype, DEVICE, kernel) == 1
    assert fuse_gates(nn.Sequential(module), dtype, DEVICE, kernel) == 0  # once
    assert replaced_method(module) == "_apply_gate"
    kernel.given.clear()
    monkeypatch.setattr(methods, "ON", DEVICE.type)
    given = module._apply_gate(rows)
    assert kernel.given == [formula]
    assert (given.shape, given.dtype) == (wanted.shape, wanted.dtype)
    apart = torch.linalg.vector_norm((given - wanted).float()) / wanted.float().norm()
    assert apart < (1e-5 if dtype is torch.float32 else 0.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", DENSE)
def test_a_dense_modules_gate_is_recognised_by_what_it_computes(
    kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, kernel = filled(DENSE[kind](), dtype), Counted()
    rows = 2 * drawn(1, 6, WIDE, dtype=dtype)
    wanted = module(rows)
    assert fuse_gates(nn.Sequential(module), dtype, DEVICE, kernel) == 1
    assert fuse_gates(nn.Sequential(module), dtype, DEVICE, kernel) == 0  # once
    assert replaced_method(module) == "forward"
    kernel.given.clear()
    monkeypatch.setattr(methods, "ON", DEVICE.type)
    for given, like in ((module(rows), wanted), (module(rows[0]), wanted[0])):
        assert (given.shape, given.dtype) == (like.shape, like.dtype)
        apart = torch.linalg.vector_norm((given - like).float()) / like.float().norm()
        assert apart < (1e-5 if dtype is torch.float32 else 0.01)
    assert len(kernel.given) == 2
    monkeypatch.setattr(methods, "ON", "elsewhere")
    assert torch.equal(module(rows), wanted)  # what is not for the kernel goes the old way
    assert len(kernel.given) == 2


def test_products_may_be_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    module, kernel = filled(LlamaMLP(config())), Counted()
    rows = drawn(1, 6, WIDE)
    wanted = module(rows)
    share_products(module, [("gate_proj", "up_proj")])
    assert fuse_gates(module, torch.float32, DEVICE, kernel) == 1
    kernel.given.clear()
    monkeypatch.setattr(methods, "ON", DEVICE.type)
    assert (module(rows) - wanted).abs().max() < 1e-5
    assert len(kernel.given) == 1


class Louder(LlamaMLP):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 1.01


class Swapped(LlamaMLP):
    def forward(self, x: Tensor) -> Any:
        return self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))


class Weighed(LlamaMLP):
    def forward(self, x: Tensor) -> Any:
        made = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        return F.linear(made, self.down_proj.weight)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Louder(config()),
        lambda: Swapped(config()),
        lambda: Weighed(config()),
        lambda: LlamaMLP(config("gelu")),  # by the error function
        lambda: LlamaMLP(config("relu2")),
        lambda: Qwen3MoeExperts(config("gelu")),
        lambda: Step3p7Experts(config(), 7.0),
    ],
)
def test_what_gates_in_another_way_is_left_alone(make: Any) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        module = filled(make(), dtype)
        assert fuse_gates(nn.Sequential(module), dtype, DEVICE, gate_rows) == 0
        assert replaced_method(module) is None


def test_a_module_that_keeps_few_gates_is_left_alone() -> None:
    sparse = Gemma3nTextMLP(
        SimpleNamespace(
            hidden_size=WIDE, intermediate_size=[INNER], hidden_activation="gelu_pytorch_tanh",
            activation_sparsity_pattern=[0.95],
        )
    )  # fmt: skip
    assert fuse_gates(filled(sparse), torch.float32, DEVICE, gate_rows) == 0


def test_a_kernel_that_errs_or_fails_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    def skewed(*given: Any) -> Tensor:
        return gate_rows(*given) * 1.001

    def unlimited(gate: Tensor, up: Tensor, *formula: float) -> Tensor:
        return gate_rows(gate, up, *Formula(*formula)._replace(limit=math.inf))

    def fails(*_: Any) -> Any:
        raise RuntimeError("no C compiler\nand much more")

    for module in (filled(GptOssExperts(config())), filled(LlamaMLP(config()))):
        for kernel in (skewed, fails):
            assert fuse_gates(module, torch.float32, DEVICE, kernel) == 0
    assert fuse_gates(filled(GptOssExperts(config())), torch.float32, DEVICE, unlimited) == 0
    assert caplog.text.count("gates run by torch: its kernel failed: no C compiler") == 2


def test_a_limit_counts_however_high_it_is() -> None:
    """Rows reach it in the trial."""

    class Unlimited(DeepseekV4Experts):  # type: ignore[misc]
        def _apply_gate(self, gate_up: Tensor) -> Any:
            gate, up = gate_up.chunk(2, dim=-1)
            return F.silu(gate) * up

    for make, limit in ((Unlimited, math.inf), (DeepseekV4Experts, 1000.0)):
        module, kernel = filled(make(config())), Counted()
        module.limit = 1000.0
        assert fuse_gates(module, torch.float32, DEVICE, kernel) == 1
        assert kernel.given[-1] == Formula(1.0, limit=limit)
