"""Fuses each RMS norm into one launch; models' own code takes six. A layer has two to six norms.

A norm is recognised by what it computes, not by its name: a module with one vector of weights and
an epsilon is tried on random rows, and replaced if torch's fused norm gives the same.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from node.kernels.trial import ERRORS_MAX, alike, drawn, given_by, tried

EPSILONS = ("variance_epsilon", "eps", "epsilon")
"""Attribute names of the epsilon in models."""
TRIAL_SCALES = (1.0, 30.0, 1e-3)
"""Scales of the rows in a trial; with the last, the epsilon is as large as the mean square."""
WIDTH_MAX = 1 << 14
"""Maximum width of a row that fits the registers of a program of our kernel."""

NormRows = Callable[[Tensor, Tensor, float], Tensor]
"""Interface of :func:`node.kernels.triton.rms_norm.norm_rows`."""


class FusedNorm(nn.Module):
    """``x / sqrt(mean(x²) + eps) · w``, or ``· (1 + w)`` if ``shifted``."""

    def __init__(
        self, weight: Tensor, eps: float, *, shifted: bool, kernel: NormRows | None = None
    ) -> None:
        """``kernel`` computes it; torch does if it is None."""
        super().__init__()
        self._kernel = kernel
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.scale: Tensor | None
        self.register_buffer("scale", 1.0 + weight.float() if shifted else None, persistent=False)
        self.eps = eps

    def forward(self, rows: Tensor) -> Tensor:
        if self._kernel is not None:
            scale = self.weight if self.scale is None else self.scale
            return self._kernel(rows, scale, self.eps)
        shape = self.weight.shape
        if self.scale is None:
            return F.rms_norm(rows, shape, self.weight, self.eps)
        return (F.rms_norm(rows, shape, None, self.eps) * self.scale).to(rows.dtype)


def fuse_norms(layer: nn.Module, dtype: torch.dtype, kernel: NormRows | None = None) -> int:
    """Replace the RMS norms in ``layer``, which computes in ``dtype``; returns their number.

    ``kernel`` computes those for which it gives the same, torch the others.
    """
    fused = 0
    for parent in list(layer.modules()):
        for name, child in list(parent.named_children()):
            made = _fused(child, dtype, kernel)
            if made is not None:
                setattr(parent, name, made)
                fused += 1
    return fused


def _fused(module: Any, dtype: torch.dtype, kernel: NormRows | None) -> FusedNorm | None:
    """Replacement for ``module``; None if there is none."""
    if isinstance(module, FusedNorm) or next(module.children(), None) is not None:
        return None
    eps = next((e for e in (getattr(module, n, None) for n in EPSILONS) if e is not None), None)
    held = dict(module.named_parameters(recurse=False))
    weight = held.get("weight")
    if not isinstance(eps, float) or weight is None or len(held) != 1 or weight.dim() != 1:
        return None
    if (
        weight.dtype is not dtype
        or dtype not in ERRORS_MAX
        or module._forward_hooks
        or module._forward_pre_hooks
    ):
        return None
    rows = drawn(1, len(TRIAL_SCALES), weight.shape[0], scales=TRIAL_SCALES)
    rows = rows.to(weight.device, dtype)
    wanted = given_by(module, rows)
    if wanted is None:
        return None
    narrow = rows.shape[-1] <= WIDTH_MAX
    with torch.inference_mode():
        for by in (kernel, None) if kernel is not None and narrow else (None,):
            for shifted in (False, True):
                made = FusedNorm(weight.data, eps, shifted=shifted, kernel=by)
                normed = tried(rows.device, "norms run by torch", partial(made, rows))
                if alike(normed, wanted, ERRORS_MAX[dtype]):
                    return made
    return None
