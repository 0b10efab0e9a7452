"""Laid out otherwise, a matrix is the same matrix."""

import torch
from torch import nn

from node.memory_layout import favour_single_rows


def test_wide_matrices_are_laid_out_by_inputs_and_compute_the_same() -> None:
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(16, 48), nn.Linear(48, 16), nn.Linear(16, 16))
    rows = torch.randn(5, 16)
    before = module(rows)
    favour_single_rows(module)
    wide, narrow, square = (part.weight for part in module)
    assert wide.shape == (48, 16)
    assert wide.stride() == (1, 48)
    assert narrow.is_contiguous()
    assert square.is_contiguous()
    assert torch.allclose(module(rows), before, atol=1e-6)


def test_other_dtypes_are_left_alone() -> None:
    module = nn.Linear(16, 48).to(torch.bfloat16)
    favour_single_rows(module)
    assert module.weight.is_contiguous()
