"""Where an answer stands in the grammar that its text follows: which tokens may come next.

A state is a function of the grammar and the answer's tokens so far, so that a session that is
replayed elsewhere draws from the same tokens there.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from dht.messages.session import RefusalCode

if TYPE_CHECKING:
    from llguidance import LLMatcher


class GrammarError(Exception):
    """A grammar cannot be followed here; the message says why in one line."""

    def __init__(self, code: RefusalCode, reason: str) -> None:
        super().__init__(" ".join(reason.split())[:400])
        self.code = code


class GrammarState:
    """One answer's way through a grammar."""

    def __init__(self, matcher: "LLMatcher", stop_token_ids: Sequence[int]) -> None:
        """``matcher`` is this state's own; ``stop_token_ids`` end the answer."""
        self._matcher = matcher
        self._stops = frozenset(stop_token_ids)
        self.on_token: Callable[[], None] | None = None
        """Called for each token that is followed; copies do not."""

    def copy(self) -> "GrammarState":
        return GrammarState(self._matcher.deep_copy(), tuple(self._stops))

    def add(self, token_id: int) -> None:
        """Follow the answer's next token. After one that the grammar forbids, only stops come."""
        if self.on_token is not None:
            self.on_token()
        if token_id not in self._stops:
            self._matcher.consume_token(token_id)

    def restrict(self, row: npt.NDArray[np.float32]) -> None:
        """Set the scores ``[vocab]`` of tokens that may not come next to minus infinity, in place.

        Stop tokens may come where the grammar lets the text end, and alone where it cannot go on:
        at its end, or where following it further would pass the limits on work.
        """
        allowed = np.zeros(len(row), bool)
        stops = [token_id for token_id in self._stops if token_id < len(row)]
        if not self._matcher.is_stopped():
            packed = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
            known = np.unpackbits(packed, bitorder="little")[: len(row)]
            allowed[: len(known)] = known
            allowed[stops] = self._matcher.is_accepting()
        if self._matcher.is_error() or not allowed.any():
            allowed[:] = False
            allowed[stops] = True
        if allowed.any():
            row[~allowed] = -np.inf
