"""Records which tokens a sequence has had, in the form that penalties need.

It has no tensors and no clocks. It is built from the prompt's ids and extended by the answer's, so
that a session that is replayed elsewhere has the same history there.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from node.sampling.grammar import GrammarState


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTargets:
    """Tokens of a prompt to score, each following one row of a chunk, from ``first_row`` on."""

    first_row: int
    token_ids: tuple[int, ...]
    top: int
    """Number of alternatives wanted for each token."""


class TokenHistory:
    """Distinct tokens of a sequence, and how often each occurs in the answer.

    ``ids`` and ``counts`` (both ``[distinct]``) are views that stay valid for the caller that took
    them; a prompt's token that the answer does not repeat has count 0.
    """

    def __init__(self, prompt_ids: Iterable[int] = (), *, answered: int = 0) -> None:
        """``prompt_ids`` end in ``answered`` tokens of the answer, if their ids are known."""
        known = list(prompt_ids)
        split = max(0, len(known) - answered)
        distinct = dict.fromkeys(known[:split])
        self._places: dict[int, int] = {token_id: at for at, token_id in enumerate(distinct)}
        room = max(64, 2 * len(distinct))
        self._ids: npt.NDArray[np.int64] = np.zeros(room, np.int64)
        self._counts: npt.NDArray[np.float32] = np.zeros(room, np.float32)
        self._ids[: len(distinct)] = list(distinct)
        self.answer_tokens = answered
        """Number of tokens of the answer so far, whether their ids are known or not."""
        self.largest_id = max(distinct, default=-1)
        for token_id in known[split:]:
            self._count(token_id)
        self.grammar: GrammarState | None = None
        """Where the answer is in its grammar, if it follows one."""

    def copy(self) -> "TokenHistory":
        """A copy that goes on by itself, to follow tokens that may come to nothing."""
        other = TokenHistory()
        other._places = dict(self._places)
        other._ids, other._counts = self._ids.copy(), self._counts.copy()
        other.answer_tokens, other.largest_id = self.answer_tokens, self.largest_id
        other.grammar = None if self.grammar is None else self.grammar.copy()
        return other

    def add(self, token_id: int) -> None:
        """Append the answer's next token."""
        self.answer_tokens += 1
        self._count(token_id)
        if self.grammar is not None:
            self.grammar.add(token_id)

    def _count(self, token_id: int) -> None:
        at = self._places.get(token_id)
        if at is None:
            at = len(self._places)
            if at == len(self._ids):
                self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
                self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
            self._ids[at] = token_id
            self._places[token_id] = at
            self.largest_id = max(self.largest_id, token_id)
        self._counts[at] += 1

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """Distinct token ids in order of appearance."""
        return self._ids[: len(self._places)]

    @property
    def counts(self) -> npt.NDArray[np.float32]:
        """Number of times that each of :attr:`ids` occurs in the answer."""
        return self._counts[: len(self._places)]
