"""How many drafted tokens of a session pay. Pure: times and costs are arguments.

A round is one way of a token around the ring. A drafted row lengthens it, for this session and for
those that run in the same steps; an accepted one saves a whole round. So k drafts are worth
(1 + a + … + a^k) / (round + k · row + wait) tokens per second, where ``a`` is the share of drafts
of this grade that were accepted lately, and ``wait`` the time until all k are there: a draft model
draws them one after the other. Of several drafters the one whose drafts are worth the most is
taken. Drafts that are not sent are watched: whether the token that came was the proposed one. So a
session in which nothing can be foretold stops to draft and begins again at no cost.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from node.drafting.config import DRAFTING
from node.drafting.drafter import GRADES

MODEL_GRADE = GRADES
"""Grade of a draft model's drafts, behind those of drafters that copy."""
HEAD_GRADE = MODEL_GRADE + 1
"""Grade of the drafts of the model's own head."""
ACCEPTED_AT_FIRST = (0.3, 0.5, 0.7, 0.8, 0.6, 0.6)
"""Assumed share of accepted drafts by grade, until it is measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftOffer:
    grade: int
    ready: int
    """Number of drafts that are ready."""
    most: int
    """Maximum number of drafts that it could make."""
    token_s: float | None = None
    """Time that each further draft takes; None: not known, and the round waits for none."""


@dataclass(slots=True, kw_only=True)
class DraftPace:
    """Chooses the number of drafts of one session, and learns from what came of them."""

    accepted: list[float] = field(default_factory=lambda: list(ACCEPTED_AT_FIRST))
    """Share of drafts that were accepted, each after an accepted one, by grade."""
    plain_s: float | None = None
    """Time of a round without drafts; None: not measured yet."""
    row_s: float | None = None
    """Time by which a drafted row lengthened a round; None: not measured yet."""
    _since_plain: int = 0
    _paid: int = 1
    """Most drafts of a round since they were last found too dear; the next take twice as many at
    most, so that what rows cost is known before many are sent."""

    def choose(self, offers: Sequence[DraftOffer], others_s: float) -> tuple[int, int]:
        """Index of the offer that pays best, and how many of its drafts; 0 where nothing pays.

        ``others_s``: the time that a drafted row takes of others (:class:`StepCost`).
        """
        best = [self.best(offer, others_s) for offer in offers]
        gains = [gain for _, gain in best]
        index = gains.index(max(gains))
        if self.is_due_plain:
            return index, 0
        likely = any(
            each.ready and self.accepted[each.grade] > DRAFTING.gain_least - 1 for each in offers
        )
        if likely and not best[index][0]:
            self._paid = 0
        return index, best[index][0]

    @property
    def is_due_plain(self) -> bool:
        """Whether the next round is to be plain, so that its time is known."""
        return self.plain_s is None or self._since_plain >= DRAFTING.plain_every

    def best(self, offer: DraftOffer, others_s: float) -> tuple[int, float]:
        """Number of the offer's drafts that pays best, and its gain over plain decoding."""
        plain_s = self.plain_s
        if plain_s is None:
            return 0, 1.0
        share, token_s = self.accepted[offer.grade], offer.token_s
        most = offer.ready if token_s is None else offer.most
        cost_s = others_s + max(self.row_s or 0.0, DRAFTING.row_share_least * plain_s)
        best, best_gain = 0, DRAFTING.gain_least
        tokens, likely = 1.0, 1.0
        for count in range(1, min(most, 1 + 2 * self._paid) + 1):
            likely *= share
            tokens += likely
            wait_s = max(0, count - offer.ready) * (token_s or 0.0)
            gain = tokens / (1.0 + (count * cost_s + wait_s) / plain_s)
            if gain > best_gain:
                best, best_gain = count, gain
        return best, best_gain if best else 1.0

    def came(self, *, grade: int, tried: int, right: int) -> None:
        """Learn from a draft whose first ``tried`` tokens were compared with what came, the first
        ``right`` of which were right."""
        for _ in range(right):
            self.accepted[grade] += DRAFTING.observed_weight * (1.0 - self.accepted[grade])
        if right < tried:
            self.accepted[grade] -= DRAFTING.observed_weight * self.accepted[grade]

    def took(self, round_s: float, drafted: int) -> None:
        if drafted == 0:
            self._since_plain = 0
            self.row_s = None if self.row_s is None else DRAFTING.row_forgotten * self.row_s
            self.plain_s = _moved(self.plain_s, round_s)
        elif self.plain_s is not None:
            self._since_plain += 1
            self._paid = max(self._paid, drafted)
            usual_s = self.plain_s + drafted * (self.row_s or 0.0)
            newest_s = (min(round_s, DRAFTING.late_round_factor * usual_s) - self.plain_s) / drafted
            before_s = newest_s if self.row_s is None else self.row_s
            weight = DRAFTING.dearer_weight if newest_s > before_s else DRAFTING.round_weight
            self.row_s = max(0.0, before_s + weight * (newest_s - before_s))


def _moved(before_s: float | None, newest_s: float) -> float:
    if before_s is None:
        return newest_s
    return before_s + DRAFTING.round_weight * (
        min(newest_s, DRAFTING.late_round_factor * before_s) - before_s
    )


@dataclass(slots=True, kw_only=True)
class StepCost:
    """What drafted rows cost the other sessions of a stage's steps."""

    row_s: float | None = None
    """Time by which a drafted row lengthens a step; None: not measured yet."""
    decoding: float = 1.0
    """Sessions that decode in a step."""

    def ran(self, decoding: int, drafted: int, took_s: float, plain_s: float | None) -> None:
        """Learn from a step in which ``decoding`` sessions decoded, with ``drafted`` rows more.

        ``plain_s``: the time of a step without those; None: not known.
        """
        if decoding:
            self.decoding += DRAFTING.round_weight * (decoding - self.decoding)
        if drafted and plain_s is not None:
            newest_s = max(0.0, took_s - plain_s) / drafted
            before_s = newest_s if self.row_s is None else self.row_s
            self.row_s = before_s + DRAFTING.round_weight * (newest_s - before_s)

    def others_s(self, stages: int, prefill_row_s: float | None) -> float:
        """Time that a drafted row takes of all others around a ring of ``stages`` stages like this.

        Until a drafted row was measured, it counts as one of a prompt.
        """
        row_s = self.row_s if self.row_s is not None else prefill_row_s or 0.0
        return max(0.0, self.decoding - 1.0) * stages * row_s
