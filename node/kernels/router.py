"""Chooses the experts of a mixture in one launch behind the router's product.

A router is recognised by what it computes: a module with a matrix of weights and a ``top_k`` is
tried on random rows, and its forward replaced if the kernel gives the same. Which of several equal
experts is chosen, and in which order the chosen come, may differ: mixtures sum over them.
"""

from collections.abc import Iterator
from functools import partial
from inspect import signature
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from node.kernels.methods import replace_method, replaced_method, takes
from node.kernels.trial import ERRORS_MAX, alike, drawn, given_by, tried
from node.packed.tensor import is_packed

BIASES = ("e_score_correction_bias",)
"""Attribute names in models of what is added to scores to choose experts."""
FACTORS = ("routed_scaling_factor", "router_scaling_factor", "route_scale")
"""Attribute names in models of what scores are multiplied by."""
TRIAL_ROWS = 48
TRIAL_DEVIATIONS = (0.5, 1.5, 3.0)
"""Standard deviations of logits in a trial; with higher ones, sigmoids would be equal to 1."""
EXPERTS_MAX = 1024
"""Maximum number of experts whose logits fit the registers of a program of the kernel."""


class ChooseExperts(Protocol):
    """Interface of :func:`node.kernels.triton.router.choose_experts`."""

    def __call__(
        self,
        logits: Tensor,
        biases: Tensor | None,
        top: int,
        dtype: torch.dtype,
        *,
        softmax: bool,
        normalised: bool,
        factor: float,
    ) -> tuple[Tensor, Tensor]: ...


class Routing(NamedTuple):
    """What a router computes."""

    product: torch.dtype
    logits: torch.dtype
    scores: torch.dtype
    softmax: bool
    """Whether scores are a softmax of the logits; else each is a sigmoid."""
    normalised: bool
    """Whether each row's scores are divided by their sum."""
    factor: float
    biases: str | None
    """Name of what is added to scores to choose experts."""
    flattens: bool
    """Whether rows may be ``[1, tokens, width]``, which makes no difference to what is returned."""

    def run(
        self, choose: ChooseExperts, module: Any, rows: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Logits, scores, and indices of experts for ``rows``, ``[tokens, width]``."""
        logits = self.logits_of(module, rows)
        scores, chosen = choose(
            logits,
            None if self.biases is None else getattr(module, self.biases),
            module.top_k,
            self.scores,
            softmax=self.softmax,
            normalised=self.normalised,
            factor=self.factor,
        )
        return logits, scores, chosen

    def logits_of(self, module: Any, rows: Tensor) -> Tensor:
        """Logits ``[tokens, experts]``."""
        weight, bias = module.weight.to(self.product), getattr(module, "bias", None)
        bias = None if bias is None else bias.to(self.product)
        return F.linear(rows.to(self.product), weight, bias).to(self.logits)


def fuse_routers(layer: nn.Module, dtype: torch.dtype, choose: ChooseExperts) -> int:
    """Let ``choose`` run in the routers in ``layer``, which computes in ``dtype``, where it gives
    the same; returns their number."""
    fused = 0
    for module in layer.modules():
        routing = _routing_of(module, dtype, choose)
        if routing is not None:
            replace_method(module, "forward", _forward(module, routing, dtype, choose))
            fused += 1
    return fused


def _forward(module: nn.Module, routing: Routing, dtype: torch.dtype, choose: ChooseExperts) -> Any:
    theirs = type(module).forward

    def forward(self: Any, hidden: Tensor) -> Any:
        if takes(hidden, dtype) and hidden.dim() in ((2, 3) if routing.flattens else (2,)):
            return routing.run(choose, self, hidden.flatten(0, -2))
        return theirs(self, hidden)

    return forward


def _routing_of(module: Any, dtype: torch.dtype, choose: ChooseExperts) -> Routing | None:
    """What ``module`` computes, if ``choose`` does it; None if not."""
    weight, top = getattr(module, "weight", None), getattr(module, "top_k", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2 or not isinstance(top, int):
        return None
    if (
        replaced_method(module) is not None
        or is_packed(module)
        or not weight.shape[0] <= EXPERTS_MAX
        or not 0 < top <= weight.shape[0]
        or dtype not in ERRORS_MAX
        or len(signature(module.forward).parameters) != 1
    ):
        return None
    with torch.inference_mode():
        rows = drawn(TRIAL_ROWS, weight.shape[1], scales=TRIAL_DEVIATIONS)
        plain = drawn(TRIAL_ROWS, weight.shape[1]).to(weight.device)
        spread = float(F.linear(plain, weight.float()).std())
        if not spread > 0:  # every expert is as good as another
            return None
        rows = (rows / spread).to(weight.device, dtype)
        wanted = given_by(module, rows)
        if not _like_a_routers(wanted, weight.shape[0], top):
            return None
        whole = given_by(module, rows[None])
        flattens = _like_a_routers(whole, weight.shape[0], top)
        for routing in _candidates(module, *wanted[:2], flattens=flattens):
            if not alike(routing.logits_of(module, rows), wanted[0], ERRORS_MAX[routing.logits]):
                continue
            given = tried(
                rows.device, "routers run by torch", partial(routing.run, choose, module, rows)
            )
            if given is None:
                return None
            if _alike(given, wanted):
                return routing
    return None


def _like_a_routers(wanted: Any, experts: int, top: int) -> bool:
    """Whether this looks like logits, scores, and indices of experts."""
    if not isinstance(wanted, tuple) or len(wanted) != 3:
        return False
    if not all(isinstance(part, Tensor) for part in wanted):
        return False
    logits, scores, chosen = wanted
    return (
        logits.shape == (TRIAL_ROWS, experts)
        and scores.shape == chosen.shape == (TRIAL_ROWS, top)
        and logits.dtype in ERRORS_MAX
        and scores.dtype in ERRORS_MAX
        and chosen.dtype is torch.int64
    )


def _candidates(
    module: Any, logits: Tensor, scores: Tensor, *, flattens: bool
) -> Iterator[Routing]:
    biases = next((name for name in BIASES if getattr(module, name, None) is not None), None)
    factors = [getattr(module, name, None) for name in FACTORS]
    known = [1.0, 1 / module.top_k, *(float(f) for f in factors if isinstance(f, int | float))]
    for product in dict.fromkeys((module.weight.dtype, torch.float32)):
        like = Routing(product, logits.dtype, scores.dtype, True, True, 1.0, biases, flattens)
        for softmax in (True, False):
            for normalised in (True, False):
                for factor in dict.fromkeys(known):
                    yield like._replace(softmax=softmax, normalised=normalised, factor=factor)


def _alike(given: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> bool:
    """Whether both chose experts of the same logits, and gave them the same scores."""
    for made, other in zip(given, wanted, strict=True):
        if made.shape != other.shape or made.dtype is not other.dtype:
            return False
    logits = wanted[0]
    if int(given[2].min()) < 0 or int(given[2].max()) >= logits.shape[1]:
        return False
    ours, our_order = logits.gather(1, given[2]).sort(dim=1)
    theirs, their_order = logits.gather(1, wanted[2]).sort(dim=1)
    scores = wanted[1].gather(1, their_order)
    error_max = ERRORS_MAX[scores.dtype]
    return torch.equal(ours, theirs) and alike(given[1].gather(1, our_order), scores, error_max)
