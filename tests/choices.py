"""Decisions of a generated run, all drawn at once.

A test whose every run takes dozens of decisions spends nearly all its time in ``data.draw``. Here
a run's decisions are bytes that Hypothesis draws, and shrinks, as one value.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from hypothesis import strategies as st

T = TypeVar("T")


@dataclass(slots=True)
class Choices:
    """Takes decisions by bytes, one each; after the last by the first again."""

    decisions: bytes
    taken: int = 0

    def below(self, count: int) -> int:
        """Decide for one of the first ``count`` numbers, at most 256, all about as likely."""
        assert 0 < count <= 256
        decision = self.decisions[self.taken % len(self.decisions)]
        self.taken += 1
        return decision * count >> 8

    def one_of(self, sequence: Sequence[T]) -> T:
        return sequence[self.below(len(sequence))]

    def yes(self) -> bool:
        return self.below(2) == 1

    def shuffled(self, sequence: Sequence[T]) -> list[T]:
        left = list(sequence)
        return [left.pop(self.below(len(left))) for _ in sequence]


def choices(count: int) -> st.SearchStrategy[Choices]:
    """Draw ``count`` decisions: let it be more than a run takes, or nearly every run."""
    return st.binary(min_size=count, max_size=count).map(Choices)
