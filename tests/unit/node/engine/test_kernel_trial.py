"""How a kernel over pages is judged before it serves."""

from types import SimpleNamespace

import pytest
import torch

from node.attention.block_table import BlockTable
from node.attention.paged_attention import attend_openly, paged_attention, set_step
from node.engine.kernel_trial import CONTEXTS, trial_step
from node.kernels.trial import ERROR_MAX
from node.kv.layer_pool import LayerPool

HEADS, KV_HEADS, WIDTH, PAGE = 8, 2, 64, 16
CPU = torch.device("cpu")


def pool_of(pages: int) -> LayerPool:
    shape = (pages * PAGE + 1, KV_HEADS, WIDTH)
    return LayerPool(
        keys=torch.full(shape, float("nan"), dtype=torch.bfloat16),
        values=torch.full(shape, float("nan"), dtype=torch.bfloat16),
    )


def exact(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rows: BlockTable,
    sinks: torch.Tensor | None, window: int, scale: float, softcap: float,
) -> torch.Tensor:  # fmt: skip
    """As good as a kernel can be: all in float32 but what goes in and what comes out."""
    out = []
    for (first, count, context), pages in zip(
        rows.segments.tolist(), rows.pages.tolist(), strict=True
    ):
        slots = [pages[at // PAGE] * PAGE + at % PAGE for at in range(context)]
        at = torch.arange(context - count, context)[:, None]
        key = torch.arange(context)[None, :]
        out.append(
            attend_openly(
                query[0, :, first : first + count].float(),
                keys[slots].float().permute(1, 2, 0),
                values[slots].float().transpose(0, 1),
                (key <= at) & ((key > at - window) | (window == 0)),
                scale,
                softcap or None,
                sinks,
            )
        )
    return torch.cat(out)[None].to(query.dtype)


@pytest.mark.parametrize("contexts", CONTEXTS, ids=str)
def test_sharp_scores_are_no_fault_of_the_kernel(contexts: tuple[tuple[int, int], ...]) -> None:
    """bfloat16 rounds a score of 40 by 0.1, and what it gives by as much; a kernel does not."""
    step, positions = trial_step({0: pool_of(200)}, contexts, PAGE, CPU)
    step.attend_pages = exact
    rows = len(positions)
    generator = torch.Generator().manual_seed(1)

    def random(heads: int, size: float) -> torch.Tensor:
        made = size * torch.randn(1, heads, rows, WIDTH, generator=generator)
        return made.to(torch.bfloat16)

    set_step(step)
    try:
        paged_attention(
            SimpleNamespace(layer_idx=0), random(HEADS, 12), random(KV_HEADS, 1),
            random(KV_HEADS, 1), None, softcap=50.0,
        )  # fmt: skip
    finally:
        set_step(None)
    assert step.compared is not None
    assert step.compared[0] < ERROR_MAX / 4


@pytest.mark.parametrize("pages", [1, 3, 30])
def test_a_small_pool_has_shorter_trials(pages: int) -> None:
    for contexts in CONTEXTS:
        step, positions = trial_step({0: pool_of(pages)}, contexts, PAGE, CPU)
        assert step.paged is not None
        assert len(positions) == sum(step.paged.spans) > 0
        held = [page for segment in step.segments for page in segment.pages]
        assert len(set(held)) == len(held) <= pages
        assert max(held) < pages


def test_no_two_tokens_have_the_same_numbers() -> None:
    """Or pages that are mistaken for others would not be found."""
    pool = pool_of(200)
    trial_step({0: pool}, CONTEXTS[1], PAGE, CPU)
    tokens = torch.cat([pool.keys[:-1], pool.values[:-1]]).flatten(1).float()
    tokens = tokens[torch.isfinite(tokens).all(dim=1)]
    assert len(tokens) == 2 * sum(count for _, count in CONTEXTS[1])
    assert len({tuple(token) for token in tokens.tolist()}) == len(tokens)
