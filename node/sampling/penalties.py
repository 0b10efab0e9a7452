"""Adjusts logits before a token is picked: bias, penalties, the minimum length, a grammar.

Semantics and order are those of ``transformers``' processors, with OpenAI's presence and frequency
penalties (as vLLM has them) between repetition penalty and minimum length. Float32 throughout.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from dht.messages.session import Sampling
from node.sampling.token_history import TokenHistory

FLOAT32_MAX = float(torch.finfo(torch.float32).max)
FLOAT32_LEAST = float(torch.finfo(torch.float32).tiny)
Scores = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRow:
    """One token to pick: its sampling options, its position, and the tokens before it."""

    sampling: Sampling
    position: int
    history: TokenHistory | None = None
    """None if no penalty, minimum length or grammar is asked for."""
    drafts: tuple[int, ...] = ()
    """Token ids that the rows behind this one were drafted with, for a run of draws."""

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
                or self.history.grammar is not None
            )
        )


def finite(scores: torch.Tensor) -> torch.Tensor:
    """``scores``, of the same shape, with finite values only; NaN counts as the least likely."""
    return torch.nan_to_num(scores, nan=-FLOAT32_MAX, posinf=FLOAT32_MAX, neginf=-FLOAT32_MAX)


def adjust(scores: torch.Tensor, draws: Sequence[SamplingRow]) -> torch.Tensor:
    """Apply the options of ``draws`` to float32 ``scores`` ``[rows, vocab]`` on the CPU, in place.

    Token ids outside the vocabulary are ignored: they came from a client.
    """
    for row, draw in zip(scores.numpy(), draws, strict=True):
        if draw.is_adjusted:
            _add_bias(row, draw.sampling)
            _penalise(row, draw)
            _forbid_stops(row, draw)
    scores.clamp_(-FLOAT32_MAX, FLOAT32_MAX)
    for row, draw in zip(scores.numpy(), draws, strict=True):  # last: nothing outweighs a grammar
        if draw.history is not None and draw.history.grammar is not None:
            draw.history.grammar.restrict(row)
    return scores


def _add_bias(row: Scores, sampling: Sampling) -> None:
    if sampling.logit_bias:
        biases = np.array(sampling.logit_bias)
        biases = biases[biases[:, 0] < len(row)]
        np.add.at(row, biases[:, 0].astype(np.int64), biases[:, 1].astype(np.float32))


def _penalise(row: Scores, draw: SamplingRow) -> None:
    sampling, history = draw.sampling, draw.history
    if history is None or not sampling.needs_answer:
        return
    known, times = history.ids, history.counts
    if history.largest_id >= len(row):
        inside = known < len(row)
        known, times = known[inside], times[inside]
    values = row[known]
    repetition = np.float32(max(sampling.repetition_penalty, FLOAT32_LEAST))  # 0 / 0 is no number
    with np.errstate(over="ignore"):
        values = np.where(values < 0, values * repetition, values / repetition)
        values -= np.float32(sampling.frequency_penalty) * times
        row[known] = values - np.float32(sampling.presence_penalty) * (times > 0)


def _forbid_stops(row: Scores, draw: SamplingRow) -> None:
    sampling, history = draw.sampling, draw.history
    if history is not None and history.answer_tokens < sampling.min_new_tokens:
        stops = [token_id for token_id in sampling.stop_token_ids if token_id < len(row)]
        row[stops] = -FLOAT32_MAX
