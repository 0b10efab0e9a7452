"""A drafter that copies: what followed the longest earlier occurrence of a session's last tokens.

It is a factor oracle (Allauzen, Crochemore, Raffinot, SOFSEM'99), an automaton with a state per
token: amortised constant time per token, and at most one edge per token besides the tokens
themselves. Its supply function gives, for each prefix, the end of the leftmost occurrence of its
longest suffix that occurs earlier. Pure.
"""

from array import array
from collections.abc import Sequence

from node.drafting.config import DRAFTING
from node.drafting.drafter import NO_DRAFT, Draft

GRADE_TOKENS = (4, 8, 16)
"""Lengths of a match from which on its draft is of grade 1, 2, 3."""
_TOKEN_BITS = 25


class SuffixDrafter:
    """Proposes the continuation of the longest earlier occurrence of the present suffix."""

    def __init__(self, window_tokens: int = DRAFTING.window_tokens) -> None:
        self._window_tokens = window_tokens
        self._forgotten = 0
        """Number of leading tokens that were forgotten."""
        self._clear()

    def _clear(self) -> None:
        self._tokens = array("i")
        self._supply = array("i", (-1,))
        self._edges: dict[int, int] = {}
        """Target by state and token, besides the edge from each state to the next one."""

    @property
    def known(self) -> int:
        """Number of the session's leading tokens that the drafter has followed."""
        return self._forgotten + len(self._tokens)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Follow the session's next tokens."""
        for token_id in token_ids:
            if len(self._tokens) >= self._window_tokens:
                kept = self._tokens[len(self._tokens) // 2 :]
                self._forgotten += len(self._tokens) - len(kept)
                self._clear()
                for each in kept:
                    self._add(each)
            self._add(token_id)

    def _add(self, token_id: int) -> None:
        tokens, supply, edges = self._tokens, self._supply, self._edges
        state = supply[len(tokens)]
        tokens.append(token_id)
        here = len(tokens)
        found = 0
        while state >= 0:
            if tokens[state] == token_id:
                found = state + 1
                break
            key = state << _TOKEN_BITS | token_id
            known = edges.get(key)
            if known is not None:
                found = known
                break
            edges[key] = here
            state = supply[state]
        supply.append(found)

    def propose(self, most: int) -> Draft:
        """Up to ``most`` tokens; what runs beyond the end repeats what is proposed itself."""
        tokens, end = self._tokens, self._supply[-1]
        if most < 1 or end < 1:
            return NO_DRAFT
        matched, here = 0, len(tokens)
        while matched < min(end, GRADE_TOKENS[-1]) and (
            tokens[end - 1 - matched] == tokens[here - 1 - matched]
        ):
            matched += 1
        if matched < DRAFTING.match_least:
            return NO_DRAFT
        proposed = list(tokens[end : end + most])
        while len(proposed) < most:
            proposed.append(proposed[len(proposed) - (here - end)])
        grade = sum(matched >= least for least in GRADE_TOKENS)
        return Draft(token_ids=tuple(proposed), grade=grade)
