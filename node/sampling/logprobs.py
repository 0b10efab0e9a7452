"""Computes log probabilities of tokens from the model's own logits (float32, no option applied)."""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from dht.messages.logprobs import LOGPROB_MIN, row_bytes
from node.device.tensors import to_device

LOGITS_MAX = 1 << 24
"""Maximum logits computed at once while scoring a prompt: 64 MiB of float32."""


def score_rows(logits: torch.Tensor, token_ids: Sequence[int], top: int) -> list[bytes]:
    """Packed score of each row's token, with ``top`` alternatives, from logits ``[rows, vocab]``.

    See :mod:`dht.messages.logprobs`. Alternatives come best first, equally likely ones by id. A
    token id outside the vocabulary gets the minimum log probability.
    """
    values = logits.detach().to(torch.float32)
    rows, vocab = values.shape
    normaliser = torch.logsumexp(values, dim=-1, keepdim=True)
    asked = to_device(token_ids, values.device)
    own = values.gather(1, asked.clamp(0, vocab - 1)[:, None]) - normaliser
    own[asked >= vocab] = LOGPROB_MIN
    found, places = torch.topk(values, min(top, vocab), dim=-1)
    likely = (found - normaliser).to("cpu").numpy()
    ids = places.to("cpu").numpy().astype(np.uint32)
    if top > vocab:  # no model is so small, but a row has a fixed length
        likely = np.pad(likely, ((0, 0), (0, top - vocab)), constant_values=LOGPROB_MIN)
        ids = np.pad(ids, ((0, 0), (0, top - vocab)))
    order = np.lexsort((ids, -likely))
    packed = np.empty((rows, 1 + 2 * top), "<f4")
    packed[:, 0] = _bounded(own[:, 0].to("cpu").numpy())
    packed[:, 2::2] = _bounded(np.take_along_axis(likely, order, 1))
    packed.view("<u4")[:, 1::2] = np.take_along_axis(ids, order, 1)
    data, size = packed.tobytes(), row_bytes(top)
    return [data[at : at + size] for at in range(0, len(data), size)]


def score_prompt(
    logits_of: Callable[[torch.Tensor], torch.Tensor],
    hidden: torch.Tensor,
    token_ids: Sequence[int],
    top: int,
    vocab: int,
) -> bytes:
    """Packed scores of ``token_ids``, each following its row of ``hidden`` ``[tokens, hidden]``.

    ``logits_of`` maps rows to logits, with at most :data:`LOGITS_MAX` numbers per call.
    """
    rows = max(1, LOGITS_MAX // vocab)
    parts: list[bytes] = []
    for at in range(0, len(token_ids), rows):
        ids = token_ids[at : at + rows]
        parts += score_rows(logits_of(hidden[at : at + len(ids)]), ids, top)
    return b"".join(parts)


def _bounded(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Log probabilities that can be sent: at most 0, and the minimum instead of NaN."""
    return np.clip(np.nan_to_num(values, nan=LOGPROB_MIN), LOGPROB_MIN, 0.0)
