"""The drafts of one session at its first stage: what to propose next, and what came of it. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from node.drafting.chain import ModelDrafts
from node.drafting.config import DRAFTING
from node.drafting.drafter import NO_DRAFT, Draft, Drafter
from node.drafting.pace import HEAD_GRADE, MODEL_GRADE, DraftOffer, DraftPace


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Drafts that pay are on their way: a chunk may wait for them."""

    count: int
    until_s: float


class Source(StrEnum):
    """Kind of drafter that made a round's drafts."""

    COPY = "copy"
    MODEL = "model"
    HEAD = "head"


@dataclass(slots=True, kw_only=True)
class SessionDrafts:
    """The drafters of a session, their pace, and the round that is under way."""

    drafter: Drafter
    model: ModelDrafts | None = None
    """A draft model's proposals, if there is a draft model."""
    pace: DraftPace = field(default_factory=DraftPace)
    source: Source = Source.COPY
    """The drafter that made the round's drafts."""
    _foretold: tuple[int, tuple[int, ...]] = (0, ())
    """Number of the session's tokens at which the last stage foretold some, and these."""
    _draft: Draft = NO_DRAFT
    """What the drafter that copies proposed for the present round, sent or not."""
    _wait: Wait | None = None
    _ahead: int = DRAFTING.ahead_at_first
    _rounds: int = 0
    _sent_s: float | None = None
    _sent: int = 0

    @property
    def waits(self) -> bool:
        """Whether the session's chunk waits for drafts."""
        return self._wait is not None

    def follow(self, token_ids: Sequence[int]) -> None:
        """Let the drafter catch up with the session's tokens so far, for a bounded time."""
        known = self.drafter.known
        if known < len(token_ids):
            self.drafter.extend(token_ids[known : known + DRAFTING.followed_tokens_max])

    def foretell(self, known: int, token_ids: tuple[int, ...]) -> None:
        """The model's own head, at the last stage, drafts these behind ``known`` tokens."""
        self._foretold = known, token_ids

    def propose(
        self, token_ids: Sequence[int], most: int, others_s: float, now_s: float
    ) -> tuple[int, ...] | Wait:
        """Drafts of the tokens behind ``token_ids``: the number that pays, at most ``most``.

        While a draft model still draws them, returns how long to wait; the next call returns those
        that are ready by then. ``others_s`` is as in :meth:`DraftPace.choose`.
        """
        if self._wait is not None:
            return self._awaited(self._wait, now_s)
        self.follow(token_ids)
        self._draft, self._sent_s, self.source = NO_DRAFT, None, Source.COPY
        if self._foretold[0] != len(token_ids):  # of an earlier round, or of another last stage
            self._foretold = 0, ()
        if self.drafter.known >= len(token_ids):
            self._draft = self.drafter.propose(most)
        if not self._draft.token_ids and not self._foretold[1] and self.model is None:
            return ()
        copied = len(self._draft.token_ids)
        offers = {Source.COPY: DraftOffer(grade=self._draft.grade, ready=copied, most=copied)}
        if foretold := self._foretold[1][:most]:
            told = len(foretold)
            offers[Source.HEAD] = DraftOffer(grade=HEAD_GRADE, ready=told, most=told)
        if self.model is not None and not self.model.failed:
            self.model.follow(token_ids, self._ahead)
            ready = min(len(self.model.ready), most)
            offered = DraftOffer(
                grade=MODEL_GRADE, ready=ready, most=most, token_s=self.model.token_s
            )
            offers[Source.MODEL] = offered
            self._look_ahead(offered, others_s)
        index, count = self.pace.choose(list(offers.values()), others_s)
        self.source = list(offers)[index]
        if self.source is not Source.MODEL:
            of = {Source.COPY: self._draft.token_ids, Source.HEAD: foretold}
            return of[self.source][:count]
        assert self.model is not None  # noqa: S101 - it made the offer
        late = count - offers[Source.MODEL].ready
        if late > 0:
            self.model.follow(token_ids, count)
            self.model.wake_at(count)
            wait_s = DRAFTING.late_drafts_factor * late * (self.model.token_s or 0.0)
            self._wait = Wait(count=count, until_s=now_s + wait_s)
            return self._awaited(self._wait, now_s)
        return self.model.ready[:count]

    def _awaited(self, wait: Wait, now_s: float) -> tuple[int, ...] | Wait:
        ready = () if self.model is None else self.model.ready
        failed = self.model is None or self.model.failed
        if len(ready) < wait.count and now_s < wait.until_s and not failed:
            return wait
        self._wait = None
        return ready[: wait.count]

    def _look_ahead(self, offer: DraftOffer, others_s: float) -> None:
        """Choose how far the draft model goes on while a round is under way: over this round's
        drafts and the next one's, or not at all where that does not pay."""
        if self.pace.plain_s is None:
            return
        self._rounds += 1
        count, _ = self.pace.best(offer, others_s)
        watched = self._rounds % DRAFTING.watched_every == 0
        self._ahead = 2 * count + 1 if count else int(watched)

    def sent(self, count: int, now_s: float) -> None:
        """A round begins, with ``count`` drafts: less than were proposed where there is no room."""
        self._sent, self._sent_s = count, now_s

    def came(self, token_ids: Sequence[int], now_s: float) -> None:
        """The round's tokens are here: the accepted drafts and one more."""
        if self._sent_s is None:
            return
        self.pace.took(now_s - self._sent_s, self._sent)
        self._judge(self._draft.grade, self._draft.token_ids, token_ids)
        self._judge(HEAD_GRADE, self._foretold[1], token_ids)
        if self.model is not None:
            self._judge(MODEL_GRADE, self.model.ready, token_ids)
        self._sent_s = None

    def _judge(self, grade: int, proposed: Sequence[int], came: Sequence[int]) -> None:
        """Compare what a drafter proposed, sent or not, with what came."""
        compared = min(len(proposed), len(came))
        right = 0
        while right < compared and proposed[right] == came[right]:
            right += 1
        self.pace.came(grade=grade, tried=min(right + 1, compared), right=right)
