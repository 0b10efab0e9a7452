"""Products of a mixture's matrices where no kernel groups packed ones: one expert after the other.

Rows are brought into the experts' order once, and what is between the products is done for all of
them at once: a mixture's own code does all of it for each expert, which takes longer than a product
of few rows. The interface is that of :mod:`.grouped_gemm`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from node.packed.tensor import PackedTensor

SOME_ROWS = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """(token, expert) pairs, ordered by expert; a pair's index counts pairs token by token."""

    order: Tensor
    """``[pairs]`` int64: index of the pair at each place."""
    ends: list[int]
    """End of each expert's places."""
    each: int
    """Experts per token."""


def group(chosen: Tensor, experts: int) -> Groups:
    """Group the experts that a router chose, ``[tokens, each]`` int64."""
    flat = chosen.reshape(-1)
    return Groups(
        order=flat.argsort(stable=True),
        ends=torch.bincount(flat, minlength=experts).cumsum(0).tolist(),
        each=chosen.shape[1],
    )


def grouped_product(
    rows: Tensor,
    weights: Tensor,
    bias: Tensor | None,
    groups: Groups,
    *,
    spread: bool,
    transposed: bool,
    shares: Tensor | None = None,
) -> Tensor:
    """Product of each pair's row with its expert's matrix, ``[pairs, outs]``; as
    :func:`node.kernels.triton.grouped_gemm.grouped_product`."""
    source = rows[groups.order // groups.each] if spread else rows
    made = rows.new_empty(len(groups.order), weights.shape[2 if transposed else 1])
    start = 0
    for expert, end in enumerate(groups.ends):
        if start < end:
            made[start:end] = _product(source[start:end], weights, expert, transposed)
            if bias is not None:
                made[start:end] += bias[expert]
        start = end
    if spread:
        return made
    if shares is not None:
        made *= shares[groups.order, None]
    return torch.empty_like(made).index_copy_(0, groups.order, made)


def sum_each(made: Tensor, each: int) -> Tensor:
    """Sums of the ``each`` products of every token, ``[tokens, width]``; as
    :func:`node.kernels.triton.groups.sum_each`."""
    return made.view(-1, each, made.shape[1]).sum(dim=1)


def _product(rows: Tensor, weights: Tensor, expert: int, transposed: bool) -> Tensor:
    if isinstance(weights, PackedTensor) and weights.turned == transposed:
        return weights.of_expert(expert, rows)
    return rows @ (weights[expert] if transposed else weights[expert].t())
