"""The drafts of one session at its first stage: what to propose next, and what came of it. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from node.drafting.drafter import Draft, Drafter
from node.drafting.pace import DraftPace

FOLLOWED_TOKENS_MAX = 2048
"""Tokens that a drafter follows at once: about a millisecond. A long prompt takes several."""


@dataclass(slots=True, kw_only=True)
class SessionDrafts:
    """A drafter, its pace, and the round that is under way."""

    drafter: Drafter
    pace: DraftPace = field(default_factory=DraftPace)
    _draft: Draft = field(default_factory=Draft)
    """What was proposed for the present round, sent or not."""
    _sent_s: float | None = None
    _sent: int = 0

    def follow(self, token_ids: Sequence[int]) -> None:
        """Let the drafter catch up with the session's tokens so far, for a bounded time."""
        known = self.drafter.known
        if known < len(token_ids):
            self.drafter.extend(token_ids[known : known + FOLLOWED_TOKENS_MAX])

    def propose(self, token_ids: Sequence[int], most: int, others_s: float) -> tuple[int, ...]:
        """Drafts of the tokens behind ``token_ids``, as many as pay, up to ``most``.

        ``others_s`` is as in :meth:`DraftPace.choose`.
        """
        self.follow(token_ids)
        self._draft, self._sent_s = Draft(), None
        if self.drafter.known < len(token_ids):
            return ()
        self._draft = self.drafter.propose(most)
        count = self.pace.choose(len(self._draft.token_ids), self._draft.grade, others_s)
        return self._draft.token_ids[:count]

    def sent(self, count: int, now_s: float) -> None:
        """A round begins, with ``count`` drafts: less than were proposed where there is no room."""
        self._sent, self._sent_s = count, now_s

    def came(self, token_ids: Sequence[int], now_s: float) -> None:
        """The round's tokens are here: the accepted drafts and one more."""
        if self._sent_s is None:
            return
        self.pace.took(now_s - self._sent_s, self._sent)
        proposed = self._draft.token_ids
        tried = min(max(1, self._sent), len(proposed))
        right = 0
        while right < min(tried, len(token_ids)) and proposed[right] == token_ids[right]:
            right += 1
        self.pace.came(grade=self._draft.grade, tried=tried, right=right)
        self._sent_s = None
