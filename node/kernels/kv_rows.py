"""Lets a kernel of ours write keys and values to their pool, where it is right; torch takes two
launches."""

from functools import partial

import torch
from torch import Tensor

from node.kernels.trial import SEED, TRIAL_TOKENS, tried
from node.kv.layer_pool import KvShape, LayerPool, WriteRows

TRIAL_ROWS = 16


def tried_writer(
    kernel: WriteRows | None, shape: KvShape, dtype: torch.dtype, device: torch.device
) -> WriteRows | None:
    """``kernel`` if it writes rows of such a layer as torch does."""
    if kernel is None or 0 in (shape.kv_heads, shape.key_width, shape.value_width):
        return None
    is_right = partial(_is_right, kernel, shape, dtype, device)
    return kernel if tried(device, "keys and values are written by torch", is_right) else None


def _is_right(kernel: WriteRows, shape: KvShape, dtype: torch.dtype, device: torch.device) -> bool:
    generator = torch.Generator().manual_seed(SEED)

    def drawn(width: int) -> Tensor:  # as models lay them out: heads beside each other
        made = torch.randn(shape.kv_heads, TRIAL_TOKENS, width, generator=generator)
        return made.to(device, dtype).transpose(0, 1)

    made = drawn(shape.key_width), drawn(shape.value_width)
    slots = torch.randperm(TRIAL_ROWS, generator=generator)[:TRIAL_TOKENS].to(device)
    pools = [LayerPool.empty(shape, TRIAL_ROWS, dtype, device, by) for by in (kernel, None)]
    for pool in pools:
        for part in pool.parts:
            part.zero_()
        pool.write(slots, *made)
    ours, theirs = pools
    return torch.equal(ours.keys, theirs.keys) and torch.equal(ours.values, theirs.values)
