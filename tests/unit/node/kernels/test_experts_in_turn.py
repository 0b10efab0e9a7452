"""Experts in turn: packed matrices are multiplied as they lie."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from node.kernels import experts_in_turn
from node.kernels.moe import IN_TURN, mixtures_of
from node.packed.formats import scaled


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_rows_of_a_packed_stack_are_those_that_its_code_means(
    turned: bool, transposed: bool
) -> None:
    """Square matrices, so that no shape tells one from the other."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(-9, 9, (3, 8, 8), generator=generator, dtype=torch.int8)
    weights = scaled("int8", codes, torch.full((3, 8, 1), 0.5), turned=turned)
    rows = torch.randn(4, 8, generator=generator)
    chosen = torch.tensor([[0], [2], [2], [1]])
    made = experts_in_turn.grouped_product(
        rows,
        weights,
        None,
        experts_in_turn.group(chosen, 3),
        spread=False,
        transposed=transposed,
    )
    plain = weights.dequantised()[chosen[:, 0]]
    order = chosen[:, 0].argsort(stable=True)
    wanted = torch.empty(4, 8)
    for place, pair in enumerate(order.tolist()):
        matrix = plain[pair] if transposed else plain[pair].t()
        wanted[pair] = rows[place] @ matrix
    torch.testing.assert_close(made, wanted)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_kernel_gets_no_stack_that_lies_otherwise_than_it_multiplies(
    turned: bool, transposed: bool
) -> None:
    """It would multiply by ``[outs, ins]`` where the code's numbers are ``[ins, outs]``."""
    codes = torch.zeros(3, 8, 8, dtype=torch.int8)
    weight: Any = scaled("int8", codes, torch.ones(3, 8, 1), turned=turned)
    weight.packing = replace(weight.packing, multiply=lambda *_: torch.zeros(1))
    mixture: Any = nn.Module()
    mixture.down_proj = nn.Parameter(weight, requires_grad=False)
    mixture.config = SimpleNamespace(_experts_implementation=IN_TURN)
    mixture._apply_gate, mixture._is_expert_parallel = (lambda made: made), False
    mixture.is_transposed = transposed
    assert list(mixtures_of([mixture])) == ([mixture] if turned is transposed else [])
