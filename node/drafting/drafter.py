"""The interface of a drafter: what proposes the next tokens of one session."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

GRADES = 4
"""Number of grades of a draft. How often the drafts of a grade are right is measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """Proposed next tokens."""

    token_ids: tuple[int, ...] = ()
    grade: int = 0
    """The drafter's own confidence, from 0 to ``GRADES - 1``."""


NO_DRAFT = Draft()


class Drafter(Protocol):
    """Follows one session's tokens and proposes the next ones."""

    @property
    def known(self) -> int:
        """Number of the session's leading tokens that the drafter has followed."""
        ...

    def extend(self, token_ids: Sequence[int]) -> None:
        """Follow the session's next tokens."""
        ...

    def propose(self, most: int) -> Draft:
        """Up to ``most`` tokens that may come next; none where nothing is known."""
        ...
