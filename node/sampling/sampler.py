"""Picks tokens from logits, with the same result on every peer and in every batch.

Randomness is counter-based (Philox, Salmon et al., SC'11), keyed by the request's seed, the token's
position in its sequence and the token id, so an answer that is resumed on another peer continues as
if uninterrupted. A token is drawn as the winner of an exponential race (the Gumbel-max trick). If
another peer's arithmetic differs in the last bits, the winner changes only if two tokens finish
that close; a draw from cumulative probabilities would be shifted by the sum of all differences.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from dht.messages.session import Sampling
from node.device.tensors import to_device
from node.sampling.penalties import SamplingRow, adjust, finite

_MASK = (1 << 64) - 1
FEW_CANDIDATES = 64
CANDIDATES = 1024
"""Number of likeliest tokens that are sorted first; all are sorted only if these do not decide."""

Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]


def noise(seed: int, position: int, ids: Ids) -> Floats:
    """A number in (0, 1) for each token of ``ids``, determined by ``(seed, position, id)``."""
    bits = np.random.Philox(key=seed & _MASK, counter=(position & _MASK) << 128)
    raw = bits.random_raw(int(ids.max()) + 1)[ids]
    return ((raw >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


def race(scores: Floats, ids: Ids, seed: int, position: int) -> int:
    """One of ``ids``, drawn with probabilities proportional to ``exp(scores)``."""
    times = np.log(-np.log(noise(seed, position, ids)))
    return int(ids[np.argmax(scores - times)])


def pick(row: torch.Tensor, sampling: Sampling, position: int) -> int:
    """Pick a token id by temperature, ``top_k``, ``top_p``, ``min_p`` from float32 ``[vocab]``.

    Among equally likely tokens, smaller ids are kept. Computed in float64 on the CPU.
    """
    vocab = len(row)
    kept = sampling.top_k if 0 < sampling.top_k < vocab else vocab
    if kept <= CANDIDATES or sampling.top_p < 1.0:
        scores, ids = _likeliest(row, sampling, kept)
    else:
        ids = np.arange(vocab)
        scores = _tempered(row, float(row.max()), sampling.temperature)
        if kept < vocab:
            scores, ids = _sorted(scores, ids)
            scores, ids = scores[:kept], ids[:kept]
    if sampling.min_p > 0.0:
        likely = scores >= np.log(sampling.min_p)  # the maximum score is 0
        scores, ids = scores[likely], ids[likely]
    return race(scores, ids, sampling.seed, position)


def _likeliest(row: torch.Tensor, sampling: Sampling, kept: int) -> tuple[Floats, Ids]:
    """The ``kept`` likeliest tokens, and of those the fewest that make up ``top_p``.

    Sorts few tokens first, and more only if those do not decide.
    """
    vocab = len(row)
    greatest = float(row.max())
    total = 0.0
    sizes = [kept + 1]
    if kept > CANDIDATES:
        whole = _tempered(row, greatest, sampling.temperature)
        if kept < vocab:
            whole = np.partition(whole, vocab - kept)[vocab - kept :]
        total = float(np.exp(whole).sum())
        sizes = [FEW_CANDIDATES + 1, CANDIDATES + 1]
    for size in sizes:
        if size >= vocab:
            break
        found, places = torch.topk(row, size)
        scores, ids = _tempered(found, greatest, sampling.temperature), places.to("cpu").numpy()
        mass = total or float(np.exp(scores[:kept]).sum())
        count = _nucleus(scores[:kept], mass, sampling.top_p)
        # If a token outside may be as likely as the last one inside, all must be examined.
        if count and found[count - 1] != found[-1]:
            scores, ids = _sorted(scores, ids)
            return scores[:count], ids[:count]
    scores, ids = _sorted(_tempered(row, greatest, sampling.temperature), np.arange(vocab))
    mass = total or float(np.exp(scores[:kept]).sum())
    count = _nucleus(scores[:kept], mass, sampling.top_p) or kept
    return scores[:count], ids[:count]


def _nucleus(scores: Floats, total: float, top_p: float) -> int:
    """Number of ``scores``, descending, that make up ``top_p`` of ``total``; 0: too few."""
    if top_p >= 1.0:
        return len(scores)
    cumulated = np.cumsum(np.exp(scores))
    count = int(np.searchsorted(cumulated, top_p * total, side="left")) + 1
    return count if count <= len(scores) else 0


def _tempered(values: torch.Tensor, greatest: float, temperature: float) -> Floats:
    raw = values.to("cpu").numpy().astype(np.float64)
    with np.errstate(over="ignore"):
        scores: Floats = (raw - greatest) / temperature
    return scores


def _sorted(scores: Floats, ids: Ids) -> tuple[Floats, Ids]:
    order = np.lexsort((ids, -scores))
    return scores[order], ids[order]


def draw_rows(
    logits: torch.Tensor, draws: Sequence[SamplingRow], greedy: Sequence[int] | None = None
) -> list[int]:
    """Draw one token per row of ``[rows, vocab]``; plain greedy rows share one device argmax.

    Temperature 0 is greedy, and ties go to the smallest id. ``greedy``: each row's likeliest token,
    if known already. All other rows come to the CPU in one transfer.
    """
    token_ids = torch.argmax(logits, dim=-1).tolist() if greedy is None else list(greedy)
    special = [
        row
        for row, draw in enumerate(draws)
        if draw.sampling.temperature != 0.0 or draw.is_adjusted
    ]
    if not special:
        return token_ids
    scores = finite(logits[to_device(special, logits.device)].detach().to(torch.float32))
    chosen = [draws[row] for row in special]
    if any(draw.is_adjusted for draw in chosen):
        scores = adjust(scores, chosen)
    scores = scores.to("cpu")
    for at, (row, draw) in enumerate(zip(special, chosen, strict=True)):
        if draw.sampling.temperature == 0.0:
            token_ids[row] = int(torch.argmax(scores[at]))
        else:
            token_ids[row] = pick(scores[at], draw.sampling, draw.position)
    return token_ids


def sample(logits: torch.Tensor, sampling: Sampling, *, position: int) -> int:
    """Draw a token id for the token at ``position`` from ``logits`` ``[vocab]``."""
    return draw_rows(logits[None], [SamplingRow(sampling=sampling, position=position)])[0]
