"""Log probabilities of tokens on the wire: rows in a frame's body.

A row is the token's own log probability, then ``top`` alternatives as (id, log probability), the
likeliest first: ``f32, top × (u32, f32)``, little-endian. Both sides know ``top`` from the request.
Unpacking checks every number and refuses those that cannot be log probabilities.
"""

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from dht.messages.codec import MalformedError

LOGPROB_MIN = -9999.0
"""Fixed by vLLM's interface: value for minus infinity, which JSON cannot express."""
SCORED_VALUES_MAX = 1 << 20
"""Maximum number of a session's prompt scores, alternatives included: 8 MiB at its last stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenScore:
    """A token's log probability (natural logarithm, before any sampling option is applied)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens at this position as (id, log probability), likeliest first."""


def row_bytes(top: int) -> int:
    """Bytes of one token's scores with ``top`` alternatives."""
    return 4 + 8 * top


def scored_values(tokens: int, top: int) -> int:
    """Number of log probabilities in ``tokens`` rows, for :data:`SCORED_VALUES_MAX`."""
    return tokens * (1 + top)


def unpack_scores(
    body: bytes | memoryview, token_ids: Sequence[int], top: int, vocab: int
) -> tuple[TokenScore, ...]:
    """The scores of ``token_ids`` in ``body``; raises MalformedError for anything else."""
    if len(body) != len(token_ids) * row_bytes(top):
        raise MalformedError(
            f"{len(body)} bytes of scores for {len(token_ids)} tokens with {top} alternatives"
        )
    row = struct.Struct("<f" + "If" * top)
    scores = []
    for token_id, values in zip(token_ids, row.iter_unpack(body), strict=True):
        alternatives = tuple(zip(values[1::2], values[2::2], strict=True))
        for logprob in (values[0], *values[2::2]):
            if not math.isfinite(logprob) or logprob > 0.0:
                raise MalformedError(f"{logprob} is no log probability")
        if any(other >= vocab for other, _ in alternatives):
            raise MalformedError(f"a score for a token outside the vocabulary of {vocab}")
        scores.append(TokenScore(token_id=token_id, logprob=values[0], top=alternatives))
    return tuple(scores)
