"""Picks tokens from logits, with the same result on every peer and in every batch.

Randomness is counter-based (Philox, Salmon et al., SC'11), keyed by the request's seed, the token's
position in its sequence and the token id, so an answer that is resumed on another peer continues as
if uninterrupted. A token is drawn as the winner of an exponential race (the Gumbel-max trick). If
another peer's arithmetic differs in the last bits, the winner changes only if two tokens finish
that close; a draw from cumulative probabilities would be shifted by the sum of all differences.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from dht.messages.session import Sampling
from node.device.tensors import to_device
from node.sampling.penalties import SamplingRow, adjust, finite

_MASK = (1 << 64) - 1
"""Fixed by 64 bits."""
_NOISE_LEAST = 2.0**-54
"""Fixed by float64: half the step of a uniform number of 53 bits."""
FEW = 1024
"""Maximum ``top_k`` for which finding the likeliest tokens costs about one pass over a row."""

Floats = npt.NDArray[np.float64]
IdArray = npt.NDArray[np.int64]


def noise(seed: int, position: int, ids: IdArray) -> Floats:
    """A number in (0, 1) for each of ``ids``, which ascend, by ``(seed, position, id)``."""
    bits = np.random.Philox(key=seed & _MASK, counter=(position & _MASK) << 128)
    raw = bits.random_raw(int(ids[-1]) + 1)[ids]
    return ((raw >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


def pick(row: torch.Tensor, sampling: Sampling, position: int) -> int:
    """Pick a token id by temperature, ``top_k``, ``top_p``, ``min_p`` from float32 ``[vocab]``.

    Among equally likely tokens, smaller ids are kept. Computed in float64 on the CPU, in time
    proportional to the vocabulary whatever the options are: nothing is sorted. All tokens of
    ``top_k`` run one race. Its winner is the answer if it belongs to the likeliest tokens that make
    up ``top_p``; otherwise neither it nor a less likely token does, and the others race on. A race
    leaves half of the probability on average.
    """
    ids = _likeliest(row, sampling.top_k)
    scores = _tempered(row, ids, sampling.temperature)
    luck = noise(sampling.seed, position, ids)
    weights = np.exp(scores)
    enough = sampling.top_p * float(weights.sum()) if sampling.top_p < 1.0 else np.inf
    if sampling.min_p > 0.0:
        weights = np.where(weights >= sampling.min_p, weights, 0.0)  # the maximum weight is 1
    while True:
        at = _first(luck, weights)
        ahead = np.flatnonzero((scores > scores[at]) | ((scores == scores[at]) & (ids < ids[at])))
        if float(weights[ahead].sum()) < enough:
            return int(ids[at])
        scores, weights, ids, luck = scores[ahead], weights[ahead], ids[ahead], luck[ahead]


def _first(luck: Floats, weights: Floats) -> int:
    """Index of the winner of an exponential race: the smallest ``-log(luck) / weight``.

    ``1 - luck`` is a little less than ``-log(luck)``, so few logarithms decide.
    """
    with np.errstate(divide="ignore", over="ignore"):
        least = np.maximum(1.0 - luck, _NOISE_LEAST) / weights
        ahead = int(np.argmin(least))
        most = max(least[ahead], -np.log(luck[ahead]) / weights[ahead])
        rivals = np.flatnonzero(least <= most)
        return int(rivals[np.argmin(-np.log(luck[rivals]) / weights[rivals])])


def _likeliest(row: torch.Tensor, top_k: int) -> IdArray:
    """Ids of the ``top_k`` likeliest tokens (0: of all) in order."""
    raw = row.numpy()
    vocab = len(raw)
    if not 0 < top_k < vocab:
        return np.arange(vocab)
    if top_k <= FEW:
        least = torch.topk(row, top_k, sorted=False).values.min().numpy()
    else:
        least = np.partition(raw, vocab - top_k)[vocab - top_k]
    kept = raw > least
    kept[np.flatnonzero(raw == least)[: top_k - np.count_nonzero(kept)]] = True
    return np.flatnonzero(kept)


def _tempered(row: torch.Tensor, ids: IdArray, temperature: float) -> Floats:
    greatest = float(row.max())
    with np.errstate(over="ignore"):
        scores: Floats = (row.numpy()[ids].astype(np.float64) - greatest) / temperature
    return scores


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
    scores = finite(logits[to_device(special, logits.device)].detach().to(torch.float32)).to("cpu")
    chosen = [draws[row] for row in special]
    if any(draw.is_adjusted for draw in chosen):
        scores = adjust(scores, chosen)
    for at, (row, draw) in enumerate(zip(special, chosen, strict=True)):
        if draw.sampling.temperature == 0.0:
            token_ids[row] = int(torch.argmax(scores[at]))
        else:
            token_ids[row] = pick(scores[at], draw.sampling, draw.position)
    return token_ids


def draw_runs(
    logits: torch.Tensor, draws: Sequence[SamplingRow], greedy: Sequence[int] | None = None
) -> list[tuple[int, ...]]:
    """Draw the tokens of each draw from its rows, a row for itself and one for each of its drafts.

    ``logits`` has these rows in order; ``greedy`` is as in :func:`draw_rows`. A draw gets a token
    after each row up to the first token that was not drafted so: those that it would get one row at
    a time, by the same positions and with the same tokens before them.
    """
    if not any(draw.drafts for draw in draws):
        return [(token_id,) for token_id in draw_rows(logits, draws, greedy)]
    if any(draw.drafts and (draw.sampling.temperature or draw.is_adjusted) for draw in draws):
        logits = logits.detach().to(torch.float32).to("cpu")  # once for all rounds
    if greedy is None:
        greedy = torch.argmax(logits, dim=-1).tolist()
    at, going, found = 0, {}, [list[int]() for _ in draws]
    for index, draw in enumerate(draws):
        going[index] = (at, draw)
        at += 1 + len(draw.drafts)
    while going:
        rows = [row for row, _ in going.values()]
        round_ = [draw for _, draw in going.values()]
        likeliest = [greedy[row] for row in rows]
        drawn = draw_rows(logits[to_device(rows, logits.device)], round_, likeliest)
        going, before = {}, going
        for (index, (row, draw)), token_id in zip(before.items(), drawn, strict=True):
            found[index].append(token_id)
            if draw.drafts and draw.drafts[0] == token_id:
                going[index] = (row + 1, _after(draw, first=not found[index][1:]))
    return [tuple(each) for each in found]


def _after(draw: SamplingRow, *, first: bool) -> SamplingRow:
    """The draw behind one whose first draft is right; the history of the first is not touched."""
    history = draw.history
    if history is not None:
        history = history.copy() if first else history
        history.add(draw.drafts[0])
    return replace(draw, position=draw.position + 1, history=history, drafts=draw.drafts[1:])


def sample(logits: torch.Tensor, sampling: Sampling, *, position: int) -> int:
    """Draw a token id for the token at ``position`` from ``logits`` ``[vocab]``."""
    return draw_rows(logits[None], [SamplingRow(sampling=sampling, position=position)])[0]
