"""Attention in the parts that an accelerator is given: the numbers of the whole."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from node.attention import paged_attention
from node.attention.mask_rules import MaskRule
from node.attention.paged_attention import attend_grouped, attend_openly

HEADS, KV_HEADS, WIDTH, CONTEXT = 6, 2, 8, 23


def given(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return (
        torch.randn(1, HEADS, rows, WIDTH, generator=generator),
        torch.randn(1, KV_HEADS, CONTEXT, WIDTH, generator=generator),
        torch.randn(1, KV_HEADS, CONTEXT, WIDTH + 4, generator=generator),
    )


@pytest.mark.parametrize("rule", [MaskRule(), MaskRule(window=5), MaskRule(window=CONTEXT - 2)])
@pytest.mark.parametrize("rows", [1, 2, 9, CONTEXT])
@pytest.mark.parametrize("at_once", [1, 4, 100])
def test_groups_of_heads_and_blocks_of_rows(rule: MaskRule, rows: int, at_once: int) -> None:
    query, keys, values = given(rows)
    allowed = rule.allowed(rows, CONTEXT, torch.device("cpu"))
    bytes_max = at_once * 4 * HEADS * CONTEXT
    out = attend_grouped(query, keys, values, allowed, 0.3, bytes_max)
    expected = F.scaled_dot_product_attention(
        query, keys, values, attn_mask=allowed, scale=0.3, enable_gqa=True
    ).transpose(1, 2)
    assert out.shape == (1, rows, HEADS, WIDTH + 4)
    assert torch.allclose(out, expected, atol=1e-6)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("sinks", [True, False])
def test_open_scores_by_blocks_are_those_of_the_whole(softcap: float | None, sinks: bool) -> None:
    rows = 9
    query, keys, values = given(rows)
    allowed = MaskRule(window=5).allowed(rows, CONTEXT, torch.device("cpu"))
    assert allowed is not None
    rest = (0.3, softcap, torch.randn(HEADS) if sinks else None)
    whole = attend_openly(query[0], keys[0].transpose(1, 2), values[0], allowed, *rest)
    blocks = paged_attention._blocks(rows, 4 * HEADS * CONTEXT, 4 * 4 * HEADS * CONTEXT)
    assert blocks == [(0, 4), (4, 8), (8, 9)]
    parts = [
        attend_openly(query[0][:, a:b], keys[0].transpose(1, 2), values[0], allowed[a:b], *rest)
        for a, b in blocks
    ]
    assert torch.allclose(torch.cat(parts), whole, atol=1e-6)
