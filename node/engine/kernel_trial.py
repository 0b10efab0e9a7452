"""Tries a kernel that reads contexts page by page on the device and layers that it will serve.

Kernels are compiled for cards, drivers and shapes that we have not seen. So before any session
comes, every layer attends to random contexts both ways: with the kernel, and in plain float32 torch
over copies. A kernel that fails or differs is not used.
"""

import functools
from collections.abc import Mapping, Sequence

import torch

from node.attention.block_table import AttendPages, BlockTable
from node.attention.paged_attention import Step
from node.attention.segment import Segment
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
"""``(rows, tokens)`` of the sessions in each step of a trial: chunks and decodes, ends within
pages, short contexts, and contexts split over several programs. The latter also come alone, because
only then may a small device have room to split them. Together they compile all variants of a
kernel."""
NUMBERS = 999_983
"""Count of random numbers drawn and repeated: a prime, so that no two tokens get the same ones."""
ROLLED = 7919
"""Offset, in numbers, between the keys or values of one session and those of the next."""


@functools.cache
def _numbers() -> torch.Tensor:
    """Random numbers, drawn once because every layer's step takes them."""
    return torch.randn(NUMBERS, generator=torch.Generator().manual_seed(SEED))


def trial_step(
    pools: Mapping[int, LayerPool],
    contexts: Sequence[tuple[int, int]],
    page_tokens: int,
    device: torch.device,
) -> tuple[Step, torch.Tensor]:
    """A step over sessions of the given ``(rows, tokens)``, with random keys and values, and its
    positions ``[rows]``. Sessions are cut short to the pages that the pools have.

    Overwrites the pools.
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
    """Largest error of the kernel, relative to the norm of attention's output for a row and head.

    Every layer of ``pools`` takes part, with hidden states of ``width`` numbers. Overwrites the
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
                loaded.forward.run(layer, layer + 1, step, hidden.to(device, dtype), positions)
                apart.extend(step.compared or [])
    if not apart:
        raise KernelRefused("no layer attends by rows and columns alone")
    worst = float(torch.tensor(apart).max())  # NaN if any is NaN
    if not worst <= ERROR_MAX:
        raise KernelRefused(f"its answers are off by {worst:.3g} of their norm")
    return worst
