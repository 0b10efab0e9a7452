"""How many tokens a model's own head drafts for a session, at the last stage. Pure.

The first stage decides how many of them pay (:mod:`node.drafting.pace`). The last stage knows
neither the round's time nor the other drafters, but learns at once which drafts were right. So it
drafts the number of tokens that have a fair chance to be right, and at least one, from which both
stages learn whether the head is worth more now.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from node.drafting.config import DRAFTING


@dataclass(slots=True, kw_only=True)
class HeadPace:
    """Follows one session's drafts."""

    right: float = DRAFTING.right_at_first
    """Share of drafts that were right, each after a right one."""
    _told: tuple[int, ...] = ()

    @property
    def count(self) -> int:
        """Number of tokens to draft."""
        count, chance = 1, self.right * self.right
        while count < DRAFTING.head_drafts_max and chance >= DRAFTING.chance_least:
            count, chance = count + 1, chance * self.right
        return count

    def told(self, token_ids: Sequence[int]) -> None:
        """These tokens were drafted behind those that came last."""
        self._told = tuple(token_ids)

    def came(self, token_ids: Sequence[int]) -> None:
        """The session's next tokens are these: compare them with what was drafted."""
        told, self._told = self._told, ()
        for drafted, token_id in zip(told, token_ids, strict=False):
            right = drafted == token_id
            self.right += DRAFTING.observed_weight * (right - self.right)
            if not right:
                return
