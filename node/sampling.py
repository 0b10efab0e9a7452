"""Picking a token from logits, the same wherever and with whatever neighbours it is done.

Randomness is counter-based (Philox, Salmon et al., SC'11), keyed by the request's seed and the
token's position in its sequence, so an answer that is resumed on another peer goes on as if
nothing had happened.
"""

import numpy as np
import torch

from dht.messages import Sampling

_MASK = (1 << 64) - 1
LARGE = 1e300
"""Stands for infinity, which differences turn into no number."""


def uniform(seed: int, position: int) -> float:
    """The number in [0, 1) that belongs to ``(seed, position)``."""
    bits = np.random.Philox(key=seed & _MASK, counter=position & _MASK)
    return float(np.random.Generator(bits).random())


def sample(logits: torch.Tensor, sampling: Sampling, *, position: int) -> int:
    """A token id from ``logits`` of shape ``[vocab]`` for the token at ``position``.

    Temperature 0 is greedy, ties going to the smallest id. Otherwise: temperature, then the
    ``top_k`` most likely tokens, then the smallest set of those whose probability reaches
    ``top_p``; all in float64 on the CPU. A logit that is no number counts as the least likely.
    """
    if sampling.temperature == 0.0:
        return int(torch.argmax(logits))
    raw = logits.detach().to("cpu", torch.float64).numpy()
    raw = np.nan_to_num(raw, nan=-LARGE, posinf=LARGE, neginf=-LARGE)
    with np.errstate(over="ignore"):
        scores = (raw - raw.max()) / sampling.temperature
    order = np.argsort(-scores, kind="stable")
    if 0 < sampling.top_k < len(order):
        order = order[: sampling.top_k]
    kept = scores[order]
    probabilities = np.exp(kept)  # the greatest score is 0
    probabilities /= probabilities.sum()
    cumulative = np.cumsum(probabilities)
    if sampling.top_p < 1.0:
        keep = int(np.searchsorted(cumulative, sampling.top_p, side="left")) + 1
        cumulative = cumulative[:keep]
    drawn = uniform(sampling.seed, position) * cumulative[-1]
    return int(
        order[min(int(np.searchsorted(cumulative, drawn, side="right")), len(cumulative) - 1)]
    )


def sample_rows(logits: torch.Tensor, samplings: list[Sampling], positions: list[int]) -> list[int]:
    """One token per row of ``[rows, vocab]``; greedy rows share one argmax on the device."""
    greedy = torch.argmax(logits, dim=-1).tolist()
    return [
        token_id if sampling.temperature == 0.0 else sample(row, sampling, position=position)
        for token_id, row, sampling, position in zip(
            greedy, logits, samplings, positions, strict=True
        )
    ]
