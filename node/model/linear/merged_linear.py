"""Merges linear modules that multiply the same rows (queries, keys, values) into one product."""

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from node.packed.tensor import is_packed, rows_join


class MergedLinear(nn.Module):
    """The matrices of several linear modules as one; the first module called multiplies for all."""

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        """``linears`` have the same inputs, dtype and device, and all or none have a bias."""
        super().__init__()
        biased = linears[0].bias is not None
        self._sizes = [linear.out_features for linear in linears]
        whole = nn.Linear(linears[0].in_features, sum(self._sizes), bias=biased, device="meta")
        weight = torch.cat([linear.weight.data for linear in linears])
        whole.weight = nn.Parameter(weight, requires_grad=False)
        if biased:
            bias = torch.cat([linear.bias.data for linear in linears])
            whole.bias = nn.Parameter(bias, requires_grad=False)
        self.linear: nn.Module = whole
        self._given: torch.Tensor | None = None
        self._made: dict[int, torch.Tensor] = {}

    def part(self, rows: torch.Tensor, index: int) -> torch.Tensor:
        """Output of the module at ``index`` for ``rows``, ``[…, its outs]``; dropped once all parts
        are taken."""
        if self._given is not rows or index not in self._made:
            self._given = rows
            parts: Iterable[torch.Tensor] = self.linear(rows).split(self._sizes, dim=-1)
            self._made = dict(enumerate(parts))
        part = self._made.pop(index)
        if not self._made:
            self._given = None
        return part


class MergedLinearPart(nn.Module):
    """Takes the place of one of the merged linear modules."""

    def __init__(self, shared: MergedLinear, index: int, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.__dict__["shared"] = shared
        self._index = index
        if index == 0:
            self.product = shared  # so that a walk over the modules meets it once

    @property
    def weight(self) -> torch.Tensor:
        """The merged matrix, ``[outs of all, ins]``, for code that asks for its dtype or device."""
        weight: torch.Tensor = self.__dict__["shared"].linear.weight
        return weight

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        part: torch.Tensor = self.__dict__["shared"].part(rows, self._index)
        return part


def share_products(layer: nn.Module, siblings: Iterable[Sequence[str]]) -> None:
    """Merge each group of ``siblings``, names of linear modules in ``layer``, into one product.

    The modules of a group must receive the same tensor, unchanged in between
    (:attr:`node.model.inspection.layer_traits.LayerTraits.siblings`). The separate matrices are
    dropped.
    """
    for names in siblings:
        linears = [layer.get_submodule(name) for name in names]
        plain = [linear for linear in linears if type(linear) is nn.Linear]
        weights = [linear.weight.data for linear in plain]
        if len(plain) < len(names):
            continue
        if any(map(is_packed, plain)) and not rows_join(weights):
            continue
        shared = MergedLinear(plain)
        for index, (name, linear) in enumerate(zip(names, plain, strict=True)):
            layer.set_submodule(name, MergedLinearPart(shared, index, linear))
