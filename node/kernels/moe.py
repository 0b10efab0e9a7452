"""Runs mixtures of experts by our own code, registered with ``transformers``.

Modules for which ``transformers`` has several implementations name the chosen one in their
configuration. :func:`use` puts ours there, once :func:`try_grouped_gemm` has seen that both agree.
"""

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from node.kernels import experts_in_turn
from node.kernels.packed import is_multiplied
from node.kernels.trial import ERROR_MAX, SEED, KernelRefused
from node.packed.tensor import packed_weights

THEIRS = "grouped_mm"
"""The implementation that ours replaces; others are left alone."""
OURS = "anabranch_grouped"
IN_TURN = "anabranch_in_turn"
"""One expert after the other (:mod:`.experts_in_turn`), for packed weights."""
BY_EXPERT = "eager"
"""What ``transformers`` calls the forward of a mixture's own code: a loop over the experts that a
step uses."""
TRIAL_EACH = 2
"""Experts per token in a trial."""
TRIAL_TOKENS = (1, 9, 0)
"""Tokens in a trial; 0 stands for as many as give every expert many rows."""


class GroupedKernel(Protocol):
    """Interface of :mod:`node.kernels.triton.grouped_gemm`."""

    SOME_ROWS: int

    def group(self, chosen: Tensor, experts: int) -> Any: ...

    def sum_each(self, made: Tensor, each: int) -> Tensor: ...

    def grouped_product(
        self,
        rows: Tensor,
        weights: Tensor,
        bias: Tensor | None,
        groups: Any,
        *,
        spread: bool,
        transposed: bool,
        shares: Tensor | None = None,
    ) -> Tensor: ...


def mixtures_of(layers: Iterable[nn.Module]) -> Iterator[Any]:
    """Modules of experts within the layers that run by ``transformers``' grouped implementation, or
    in turn because they are packed, though a kernel multiplies by them."""
    for layer in layers:
        for module in layer.modules():
            config = getattr(module, "config", None)
            runs_by = getattr(config, "_experts_implementation", None)
            if (
                hasattr(module, "_apply_gate")
                and (runs_by == THEIRS or (runs_by == IN_TURN and is_multiplied(module)))
                and not getattr(module, "_is_expert_parallel", True)
            ):
                yield module


def run_experts(
    kernel: GroupedKernel, module: Any, hidden: Tensor, chosen: Tensor, shares: Tensor
) -> Tensor:
    """Weighted sum of the outputs of each token's experts, ``[tokens, width]``.

    ``hidden`` is ``[tokens, width]``; ``chosen`` and ``shares``, the experts and their weights, are
    ``[tokens, each]``.
    """
    groups = kernel.group(chosen, module.num_experts)
    name = "gate_up_proj" if module.has_gate else "up_proj"
    weights = getattr(module, name)
    made = kernel.grouped_product(
        hidden.to(weights.dtype),
        weights,
        getattr(module, f"{name}_bias") if module.has_bias else None,
        groups,
        spread=True,
        transposed=module.is_transposed,
    )
    made = module._apply_gate(made) if module.has_gate else module.act_fn(made)
    normed = module.has_post_expert_norm
    made = kernel.grouped_product(
        made,
        module.down_proj,
        module.down_proj_bias if module.has_bias else None,
        groups,
        spread=False,
        transposed=module.is_transposed,
        shares=None if normed else shares.reshape(-1),
    )
    if normed:
        made = module.post_expert_norm(made) * shares.reshape(-1, 1)
    return kernel.sum_each(made, chosen.shape[1]).to(hidden.dtype)


def try_grouped_gemm(kernel: GroupedKernel, layers: Iterable[nn.Module]) -> float:
    """Largest error of the kernel, relative to the norm of ``transformers``' output for a token.

    0 if ``layers`` have no mixture of experts. Raises KernelRefused, and whatever the kernel and
    its compiler raise.
    """
    worst = 0.0
    generator = torch.Generator().manual_seed(SEED)
    for module in mixtures_of(layers):
        down = module.down_proj
        width = down.shape[2] if module.is_transposed else down.shape[1]
        each = min(TRIAL_EACH, module.num_experts)
        many = 1 + kernel.SOME_ROWS * module.num_experts // each
        for tokens in (count or many for count in TRIAL_TOKENS):
            hidden = torch.randn(tokens, width, generator=generator)
            shares = torch.rand(tokens, module.num_experts, generator=generator)
            top = shares.topk(each)
            given = (
                hidden.to(down.device, down.dtype),
                top.indices.to(down.device),
                top.values.to(down.device, down.dtype),
            )
            with torch.inference_mode():
                theirs = module(*given).float()
                ours = run_experts(kernel, module, *given).float()
            norm = torch.linalg.vector_norm
            apart = float((norm(ours - theirs, dim=-1) / norm(theirs, dim=-1)).max())
            if not apart <= ERROR_MAX:  # true for NaN, too
                raise KernelRefused(f"its answers are off by {apart:.3g} of their norm")
            worst = max(worst, apart)
    return worst


def use(kernel: GroupedKernel, layers: Iterable[nn.Module]) -> int:
    """Let ``kernel`` run all mixtures of experts in ``layers``; returns their number."""
    _register(OURS, kernel)
    found = list(mixtures_of(layers))
    for module in found:
        module.config._experts_implementation = OURS
    return len(found)


def run_packed_experts(layer: nn.Module) -> None:
    """Let mixtures with packed weights dequantise only the experts that a step uses, one after the
    other: by our code, or by their own where that does more than ``transformers`` expects."""
    for module in layer.modules():
        config: Any = getattr(module, "config", None)
        if hasattr(config, "_experts_implementation") and packed_weights(module):
            _register(IN_TURN, experts_in_turn)
            known = hasattr(module, "_apply_gate")
            config._experts_implementation = IN_TURN if known else BY_EXPERT


def _register(name: str, kernel: GroupedKernel) -> None:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    def forward(module: Any, hidden: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        return run_experts(kernel, module, hidden, chosen, shares)

    ALL_EXPERTS_FUNCTIONS.register(name, forward)
