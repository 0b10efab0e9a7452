"""A kernel that reads contexts page by page, tried on the device and the layers that it will serve.

Kernels are compiled for a card, a driver and a shape that nobody has seen before. So before any
session comes, every layer attends to random contexts both ways: by the kernel, and in the open and
in float32 over copies. A kernel that fails or differs is not used.
"""

import functools
from collections.abc import Mapping, Sequence

import torch

from node.attention.block_table import AttendPages, BlockTable
from node.attention.paged_attention import Segment, Step
from node.device.tensors import to_device
from node.kernels.trial import ERROR_MAX, SEED, KernelRefused
from node.kv.layer_pool import LayerPool
from node.kv.pool import pool_rows
from node.model.layer_range import LoadedRange

CONTEXTS = (
    ((1, 40), (5, 23), (19, 19), (1, 3)),
    ((1, 40), (70, 300), (19, 19), (1, 700)),
    ((1, 700),),
    ((9, 300),),
)
"""Rows and tokens of the sessions in each step of a trial: chunks and decodes, ends within pages,
contexts that are short, and that are split over several programs; these alone, too, as only then
a small device may have room to split them. All variants of a kernel are compiled by these."""
NUMBERS = 999_983
"""That are drawn and repeated: a prime, so that no two tokens of a session have the same."""
ROLLED = 7919
"""By so many numbers what one session has as keys or values differs from what the next has."""


@functools.cache
def _numbers() -> torch.Tensor:
    """Drawn once, as a step of each layer takes them."""
    return torch.randn(NUMBERS, generator=torch.Generator().manual_seed(SEED))


def trial_step(
    pools: Mapping[int, LayerPool],
    contexts: Sequence[tuple[int, int]],
    page_tokens: int,
    device: torch.device,
) -> tuple[Step, torch.Tensor]:
    """A step of sessions with so many ``(rows, tokens)`` over random keys and values, and its
    positions ``[rows]``; sessions have no more tokens than there are pages for in the pools.

    Writes over the pools.
    """
    wanted = 2 * sum(-(-tokens // page_tokens) for _, tokens in contexts)
    there = min(pool.scrap_row for pool in pools.values()) // page_tokens
    generator = torch.Generator().manual_seed(SEED)
    numbers = _numbers().to(device)
    pages: list[int] = torch.randperm(min(wanted, there), generator=generator).tolist()
    segments: list[Segment] = []
    written: list[torch.Tensor] = []
    positions: list[int] = []
    for asked_rows, asked_tokens in contexts:
        if not pages:
            break
        tokens = min(asked_tokens, len(pages) * page_tokens)
        rows = min(asked_rows, tokens)
        count = -(-tokens // page_tokens)
        own, pages = pages[:count], pages[count:]
        slots = pool_rows(own, tokens, page_tokens)
        for pool in pools.values():
            for part in (pool.keys, pool.values):
                size = tokens * part[0].numel()
                numbers = numbers.roll(ROLLED)
                made = numbers.to(part.dtype).repeat(-(-size // NUMBERS))[:size]
                part[slots.to(device)] = made.view(tokens, *part.shape[1:])
        written.append(slots[tokens - rows :])
        segments.append(
            Segment(
                first=len(positions),
                last=len(positions) + rows,
                context_tokens=tokens,
                slots=to_device(slots, device),
                tokens_max=tokens,
                pages=own,
                run=False,
            )
        )
        positions.extend(range(tokens - rows, tokens))
    step = Step(
        pools=dict(pools),
        write_slots=to_device(torch.cat(written), device),
        segments=segments,
        paged=BlockTable.of(segments, page_tokens, device),
        compared=[],
    )
    return step, to_device(positions, device)


def try_attention_kernel(
    attend_pages: AttendPages,
    loaded: LoadedRange,
    pools: Mapping[int, LayerPool],
    page_tokens: int,
    width: int,
    dtype: torch.dtype,
) -> float:
    """How far the kernel is off at most, of the norm of what attention gives a row in a head.

    Every layer of ``pools`` takes part, with hidden states of ``width`` numbers. Writes over the
    pools. Raises KernelRefused, and whatever the kernel and its compiler raise.
    """
    device = loaded.device
    generator = torch.Generator().manual_seed(SEED)
    apart: list[float] = []
    with torch.inference_mode():
        for contexts in CONTEXTS:
            for layer, pool in pools.items():
                step, positions = trial_step({layer: pool}, contexts, page_tokens, device)
                step.attend_pages = attend_pages
                hidden = torch.randn(len(positions), width, generator=generator)
                loaded.run(layer, layer + 1, step, hidden.to(device, dtype), positions)
                apart.extend(step.compared or [])
    if not apart:
        raise KernelRefused("no layer attends by rows and columns alone")
    worst = float(torch.tensor(apart).max())  # no number where any is none
    if not worst <= ERROR_MAX:
        raise KernelRefused(f"its answers are off by {worst:.3g} of their norm")
    return worst
