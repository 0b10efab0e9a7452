"""A kernel that reads contexts page by page, tried on the device and the layers that it will serve.

Kernels are compiled for a card, a driver and a shape that nobody has seen before. So before any
session comes, every layer attends to random contexts both ways: by the kernel, and by torch's own
kernels over copies. A kernel that fails or differs is not used.
"""

from collections.abc import Mapping, Sequence

import torch

from node.attention import LayerPool, Segment, Step
from node.kv_pool import pool_rows
from node.model import LoadedRange
from node.paged_rows import AttendPages, PagedRows
from node.tensors import brought

SEED = 0
SHORT = ((1, 40), (5, 23), (19, 19), (1, 3))
LONG = ((1, 40), (70, 300), (19, 19), (1, 700))
"""Rows and tokens of the sessions in a trial: chunks and decodes, ends within pages, contexts that
are split over several programs and others; all variants of a kernel are compiled by these."""
ERROR_MAX = 0.02
"""Of the norm of what attention gives: rounding to bfloat16 is 0.003 of it."""


class KernelRefused(Exception):
    """Says what the kernel did wrong."""


def trial_step(
    pools: Mapping[int, LayerPool],
    contexts: Sequence[tuple[int, int]],
    page_tokens: int,
    device: torch.device,
) -> tuple[Step, torch.Tensor]:
    """A step of sessions with so many ``(rows, tokens)`` over random keys and values, and its
    positions ``[rows]``; sessions for which the pools have no pages are left out.

    Writes over the pools.
    """
    wanted = 2 * sum(-(-tokens // page_tokens) for _, tokens in contexts)
    there = min(pool.scrap_row for pool in pools.values()) // page_tokens
    generator = torch.Generator().manual_seed(SEED)
    pages: list[int] = torch.randperm(min(wanted, there), generator=generator).tolist()
    segments: list[Segment] = []
    written: list[torch.Tensor] = []
    positions: list[int] = []
    for rows, tokens in contexts:
        count = -(-tokens // page_tokens)
        if count > len(pages):
            continue
        own, pages = pages[:count], pages[count:]
        slots = pool_rows(own, tokens, page_tokens)
        for pool in pools.values():
            for part in (pool.keys, pool.values):
                made = torch.randn(tokens, *part.shape[1:], generator=generator)
                part[slots.to(device)] = made.to(device, part.dtype)
        written.append(slots[tokens - rows :])
        segments.append(
            Segment(
                first=len(positions),
                last=len(positions) + rows,
                context_tokens=tokens,
                slots=brought(slots, device),
                tokens_max=tokens,
                pages=own,
                run=False,
            )
        )
        positions.extend(range(tokens - rows, tokens))
    step = Step(
        pools=dict(pools),
        write_slots=brought(torch.cat(written), device),
        segments=segments,
        paged=PagedRows.of(segments, page_tokens, device),
        compared=[],
    )
    return step, brought(positions, device)


def try_kernel(
    attend_pages: AttendPages,
    loaded: LoadedRange,
    pools: Mapping[int, LayerPool],
    page_tokens: int,
    width: int,
    dtype: torch.dtype,
) -> float:
    """How far the kernel is off at most, of the norm of what attention gives.

    Every layer of ``pools`` takes part, with hidden states of ``width`` numbers. Writes over the
    pools. Raises KernelRefused, and whatever the kernel and its compiler raise.
    """
    device = loaded.device
    generator = torch.Generator().manual_seed(SEED)
    apart: list[float] = []
    with torch.inference_mode():
        for contexts in (SHORT, LONG):
            for layer, pool in pools.items():
                step, positions = trial_step({layer: pool}, contexts, page_tokens, device)
                step.attend_pages = attend_pages
                hidden = torch.randn(len(positions), width, generator=generator)
                loaded.run(layer, layer + 1, step, hidden.to(device, dtype), positions)
                apart.extend(step.compared or [])
    if not apart:
        raise KernelRefused("no layer attends by rows and columns alone")
    if not all(each <= ERROR_MAX for each in apart):  # or is no number
        raise KernelRefused(f"its answers are off by {max(apart):.3g} of their norm")
    return max(apart)
