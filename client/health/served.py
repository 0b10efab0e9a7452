"""What the whole swarm served, from the sums that its last stages announce. Pure.

These are the peers' own words: a peer that invents tokens is not found out here, so the page says
whose count it is. One look cannot count for more than a peer could have sampled at most.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from dht.messages.types import NodeRecord

TOKENS_PER_S_MAX = 20_000.0
"""No peer is believed to sample more than this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedCounts:
    """Answers and tokens between two looks."""

    answers: int = 0
    tokens: int = 0


@dataclass(slots=True)
class ServedTally:
    """Turns sums since each peer joined into what came since the last look."""

    _last: dict[str, NodeRecord] = field(default_factory=dict)
    _looked_unix_s: float | None = None

    def look(self, records: Iterable[NodeRecord], now_unix_s: float) -> ServedCounts:
        """What was served since the last look; nothing at the first one, which has no before.

        A peer that joined between two looks counts from its start, one that started again too.
        """
        answers = tokens = 0
        since_s = self._looked_unix_s
        for record in records:
            before = self._last.get(record.peer_id)
            self._last[record.peer_id] = record
            if since_s is None:
                continue
            if before is not None and before.joined_unix_s == record.joined_unix_s:
                answered = record.answers - before.answers
                sampled = record.answer_tokens - before.answer_tokens
            elif record.joined_unix_s >= since_s:
                answered, sampled = record.answers, record.answer_tokens
            else:
                continue  # seen for the first time: what it did before is not known by hour
            limit = int(TOKENS_PER_S_MAX * max(0.0, now_unix_s - since_s))
            tokens += min(max(0, sampled), limit)
            answers += min(max(0, answered), limit)
        self._looked_unix_s = now_unix_s
        return ServedCounts(answers=answers, tokens=tokens)

    def forget(self, kept: Iterable[str]) -> None:
        """Keep what is known of these peers alone."""
        names = set(kept)
        self._last = {name: record for name, record in self._last.items() if name in names}
