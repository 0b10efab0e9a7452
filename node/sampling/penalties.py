"""Adjusts logits before a token is picked: bias, penalties, the minimum length.

Semantics and order are those of ``transformers``' processors, with OpenAI's presence and frequency
penalties (as vLLM has them) between repetition penalty and minimum length. Float32 throughout.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dht.messages.session import Sampling
from node.device.tensors import to_device
from node.sampling.token_history import TokenHistory

FLOAT32_MAX = float(torch.finfo(torch.float32).max)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRow:
    """One token to pick: its sampling options, its position, and the tokens before it."""

    sampling: Sampling
    position: int
    history: TokenHistory | None = None
    """None if neither penalties nor a minimum length are asked for."""

    @property
    def is_adjusted(self) -> bool:
        """Whether any option but temperature and the choice of candidates applies."""
        sampling = self.sampling
        return bool(sampling.logit_bias) or (
            self.history is not None
            and (
                sampling.repetition_penalty != 1.0
                or sampling.presence_penalty != 0.0
                or sampling.frequency_penalty != 0.0
                or self.history.answer_tokens < sampling.min_new_tokens
            )
        )


def finite(scores: torch.Tensor) -> torch.Tensor:
    """``scores`` with finite values only; NaN counts as the least likely."""
    return torch.nan_to_num(scores, nan=-FLOAT32_MAX, posinf=FLOAT32_MAX, neginf=-FLOAT32_MAX)


def adjust(scores: torch.Tensor, draws: Sequence[SamplingRow]) -> torch.Tensor:
    """Apply the options of ``draws`` to float32 ``scores`` ``[rows, vocab]``, in place.

    Token ids outside the vocabulary are ignored: they came from a client.
    """
    _add_bias(scores, draws)
    _penalise(scores, draws)
    _forbid_stops(scores, draws)
    return scores.clamp_(-FLOAT32_MAX, FLOAT32_MAX)


def _add_bias(scores: torch.Tensor, draws: Sequence[SamplingRow]) -> None:
    places = [
        (row, token_id, bias)
        for row, draw in enumerate(draws)
        for token_id, bias in draw.sampling.logit_bias
        if token_id < scores.shape[1]
    ]
    if not places:
        return
    rows, ids, biases = (np.array(column) for column in zip(*places, strict=True))
    at = (_on(scores, rows), _on(scores, ids))
    scores.index_put_(at, _on(scores, biases.astype(np.float32)), accumulate=True)


def _penalise(scores: torch.Tensor, draws: Sequence[SamplingRow]) -> None:
    rows, ids, counts, penalties = [], [], [], []
    for row, draw in enumerate(draws):
        sampling, history = draw.sampling, draw.history
        if history is None or not sampling.needs_answer:
            continue
        known, times = history.ids, history.counts
        if history.largest_id >= scores.shape[1]:
            inside = known < scores.shape[1]
            known, times = known[inside], times[inside]
        rows.append(np.full(len(known), row))
        ids.append(known)
        counts.append(times)
        three = (
            sampling.repetition_penalty,
            sampling.frequency_penalty,
            sampling.presence_penalty,
        )
        penalties.append(np.tile(np.array(three, np.float32), (len(known), 1)))
    if not rows:
        return
    at = (_on(scores, np.concatenate(rows)), _on(scores, np.concatenate(ids)))
    times_each = _on(scores, np.concatenate(counts))
    repetition, frequency, presence = _on(scores, np.concatenate(penalties)).unbind(1)
    values = scores[at]
    values = torch.where(values < 0, values * repetition, values / repetition)
    scores[at] = values - frequency * times_each - presence * (times_each > 0)


def _forbid_stops(scores: torch.Tensor, draws: Sequence[SamplingRow]) -> None:
    places = [
        (row, token_id)
        for row, draw in enumerate(draws)
        if draw.history is not None and draw.history.answer_tokens < draw.sampling.min_new_tokens
        for token_id in draw.sampling.stop_token_ids
        if token_id < scores.shape[1]
    ]
    if places:
        rows, ids = (np.array(column) for column in zip(*places, strict=True))
        scores[_on(scores, rows), _on(scores, ids)] = -FLOAT32_MAX


def _on(
    scores: torch.Tensor, values: "np.ndarray[tuple[int, ...], np.dtype[np.generic]]"
) -> torch.Tensor:
    return to_device(torch.from_numpy(values), scores.device)
