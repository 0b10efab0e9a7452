"""Lets a kernel of ours multiply by packed weights from their bits.

Without it they are dequantised for every product, and mixtures of experts run one expert after the
other. The kernel is tried on some rows of each kind of matrix.
"""

import functools
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from node.kernels.trial import ERROR_MAX, SEED, tried
from node.packed.packing import Packing, Parts
from node.packed.tensor import PackedTensor, packed_weights

TRIAL_OUTS = 256
"""Rows of a matrix that a trial multiplies by, at least."""
TRIAL_ROWS = (1, 33, 129)


class PackedKernel(Protocol):
    """Interface of :mod:`node.kernels.triton.packed`."""

    def takes(self, packing: Packing, parts: Parts) -> bool: ...

    def packed_product(self, rows: Tensor, packing: Packing, parts: Parts) -> Tensor: ...


def multiply_packed(module: nn.Module, kernel: PackedKernel) -> int:
    """Let ``kernel`` multiply by the packed weights within ``module`` where its products are right;
    returns their number."""
    seen: dict[Any, bool] = {}
    found = 0
    for weight in module.parameters():
        if not isinstance(weight, PackedTensor) or not isinstance(weight.packing, Packing):
            continue
        if not kernel.takes(weight.packing, weight.parts):
            continue
        kinds = frozenset((name, part.dtype) for name, part in weight.parts.items())
        key = (weight.packing, kinds, weight.dtype)
        if key not in seen:
            trial = functools.partial(_is_right, kernel, weight.packing, weight.parts, weight.dtype)
            seen[key] = bool(tried(weight.device, "packed weights are dequantised", trial))
        if seen[key]:
            weight.packing = replace(weight.packing, multiply=kernel.packed_product)
            found += 1
    return found


def is_multiplied(module: nn.Module) -> bool:
    """Whether a kernel multiplies by all weights of the module itself that are packed, and there
    are some. A kernel takes experts' matrices as ``[outs, ins]``: not those of a stack that are
    stored as the code's numbers lie, if that means ``[ins, outs]``."""
    packed, transposed = packed_weights(module), bool(getattr(module, "is_transposed", False))
    return bool(packed) and all(
        getattr(each.packing, "multiply", None) and (each.dim() < 3 or each.turned == transposed)
        for each in packed
    )


def _is_right(kernel: PackedKernel, packing: Packing, parts: Parts, dtype: torch.dtype) -> bool:
    while parts["codes"].dim() > 2:  # one of the experts
        parts = {name: part[0] for name, part in parts.items()}
    outs, ins = packing.shape(parts)
    some = packing.some_rows(parts, 0, min(outs, -(-TRIAL_OUTS // packing.rows) * packing.rows))
    matrix = packing.dequantise(some, torch.float32)
    generator = torch.Generator().manual_seed(SEED)
    for count in TRIAL_ROWS:
        rows = torch.randn(count, ins, generator=generator).to(matrix.device, dtype)
        made = kernel.packed_product(rows, packing, some).float()
        wanted = rows.float() @ matrix.t()
        if not (made - wanted).norm() <= ERROR_MAX * wanted.norm():  # true for NaN, too
            return False
    return True
