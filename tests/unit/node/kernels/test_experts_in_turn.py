"""Experts in turn: packed matrices are multiplied as they lie."""

import pytest
import torch

from node.kernels import experts_in_turn
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
