"""One product where several linear modules multiply the same rows (queries, keys and values)."""

from collections.abc import Iterable, Sequence

import torch
from torch import nn


class MergedLinear(nn.Module):
    """The matrices of several linear modules as one; who asks first multiplies for all."""

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
        """What the module at ``index`` makes of ``rows``; nothing is kept once all have asked."""
        if self._given is not rows or index not in self._made:
            self._given = rows
            parts: Iterable[torch.Tensor] = self.linear(rows).split(self._sizes, dim=-1)
            self._made = dict(enumerate(parts))
        part = self._made.pop(index)
        if not self._made:
            self._given = None
        return part


class MergedLinearPart(nn.Module):
    """Stands for one of the linear modules."""

    def __init__(self, shared: MergedLinear, index: int, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.__dict__["shared"] = shared
        self._index = index
        if index == 0:
            self.product = shared  # so that whoever walks the modules meets it once

    @property
    def weight(self) -> torch.Tensor:
        """All of the matrices, for those who ask about dtype or device."""
        weight: torch.Tensor = self.__dict__["shared"].linear.weight
        return weight

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        part: torch.Tensor = self.__dict__["shared"].part(rows, self._index)
        return part


def share_products(layer: nn.Module, siblings: Iterable[Sequence[str]]) -> None:
    """Give each group of ``siblings``, names of linear modules in ``layer``, one product.

    They must be given the same tensor, which nothing changes in between
    (:attr:`node.model.layer_traits.LayerTraits.siblings`). The separate matrices are let go.
    """
    for names in siblings:
        linears = [layer.get_submodule(name) for name in names]
        plain = [linear for linear in linears if type(linear) is nn.Linear]
        if len(plain) < len(names):
            continue
        shared = MergedLinear(plain)
        for index, (name, linear) in enumerate(zip(names, plain, strict=True)):
            layer.set_submodule(name, MergedLinearPart(shared, index, linear))
