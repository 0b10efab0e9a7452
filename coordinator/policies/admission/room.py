"""The KV of one stage: who is let in by which estimate, who takes pages, and who gives way. Pure.

A stage lets a session in by its *promise*: the prompt and the expected answer
(:mod:`coordinator.policies.admission.lengths`), on the layers that the session runs there, not its
longest possible answer. It takes pages as its tokens come. One that goes on beyond its promise
borrows pages that others have not taken yet, and gives them back when they do. So a stage holds
more sessions, and four laws keep that fair:

- A session that holds no more than its promise gives way to nobody but the oldest one. Who asks for
  a long answer takes pages from those alone who do the same.
- Among those who borrow, the newest gives way first; before it, the newest of a client that borrows
  with several sessions.
- The oldest ordinary session gives way to nobody, so it always ends; nor do urgent sessions, which
  are let in by their whole length. A session longer than the stage has KV for is refused.
- A session that gave way and comes back is promised its next tokens, too, and for a while newer
  ordinary sessions leave it the room; a client with many of them is left no more than it may keep.

A fifth law keeps one client from taking all. Where a session finds no room, the newest sessions of
the client that has most here make room for it, as long as that client keeps
``ADMISSION.crowd_part`` of all that is charged, and ``ADMISSION.crowd_times`` what the newcomer's
client would then have. A client's only session never makes room, nor do sessions of clients that
have about as much as the newcomer's, because sessions that make room must be replayed.

The unit is a page on one layer. Sessions that run disjoint layers share nothing. Stages and the
simulator both run this; the time is passed in.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from coordinator.policies.admission.config import ADMISSION
from coordinator.policies.admission.lengths import AnswerLengths
from coordinator.policies.admission.rules import Claim, claim_fits, takes_headroom


@dataclass(frozen=True, slots=True, kw_only=True)
class KvAsk:
    """A session that asks for KV on layers ``[start, end)``."""

    session: str
    client: str
    start: int
    end: int
    tokens: int
    """Tokens known at the open: the prompt, with the answer so far."""
    most_tokens: int
    """Most tokens that the session may come to hold."""
    claim: Claim | None = None
    """Why the session says that it is urgent, if it does."""
    name: str = ""
    """What stays the same when the session gives way and comes back."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Holder:
    """A session that was let in. Sizes are in pages."""

    ask: KvAsk
    number: int
    """Sessions are numbered as they are let in: the newest has the largest number."""
    urgent: bool
    promised: int
    held: int = 0
    tokens: int = 0
    """Tokens for which the session took pages."""

    @property
    def charged(self) -> int:
        return max(self.promised, self.held)

    @property
    def borrowed(self) -> int:
        return max(0, self.held - self.promised)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Return:
    """Room left for a session that gave way. Sizes are in pages."""

    ask: KvAsk
    promised: int
    until_s: float


@dataclass(slots=True)
class KvRoom:
    """Accounts for the KV of a stage that holds layers ``[start, end)``, in pages per layer."""

    start: int
    end: int
    pages: int
    """Pages that each layer has."""
    page_tokens: int = ADMISSION.page_tokens
    lengths: AnswerLengths = field(default_factory=AnswerLengths)
    give: Callable[[str, int], bool] = lambda session, tokens: True
    """Gives a session pages for its first tokens, and returns whether there were some; pages are
    counted here once they were given."""
    _holders: dict[str, _Holder] = field(default_factory=dict)
    """Sessions in the order in which they were let in."""
    _numbers: int = 0
    _returns: dict[tuple[str, str], _Return] = field(default_factory=dict)
    _held: list[int] = field(default_factory=list)
    """Pages taken, by layer."""
    _charged: list[int] = field(default_factory=list)
    """Sum over sessions of what is promised or held, the larger of the two, by layer."""

    def __post_init__(self) -> None:
        self._held = [0] * (self.end - self.start)
        self._charged = [0] * (self.end - self.start)

    def __contains__(self, session: str) -> bool:
        return session in self._holders

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._holders))

    # What is free

    @property
    def capacity_tokens(self) -> int:
        """Tokens that each layer has room for."""
        return self.pages * self.page_tokens

    @property
    def free_tokens(self) -> int:
        """Tokens on the fullest layer that are neither promised nor held."""
        return max(0, self.pages - max(self._charged, default=0)) * self.page_tokens

    @property
    def charged_tokens(self) -> int:
        """Tokens on the fullest layer that are promised or held."""
        return max(self._charged, default=0) * self.page_tokens

    @property
    def untaken_tokens(self) -> int:
        """Tokens on the fullest layer that nobody has taken."""
        return (self.pages - max(self._held, default=0)) * self.page_tokens

    def charged_of(self, session: str) -> int:
        """Tokens that are promised to a session or held by it; 0 for an unknown one."""
        holder = self._holders.get(session)
        return 0 if holder is None else holder.charged * self.page_tokens

    def held_of(self, session: str) -> int:
        """Tokens for which a session has taken pages; 0 for an unknown one."""
        holder = self._holders.get(session)
        return 0 if holder is None else holder.held * self.page_tokens

    def _pages_of(self, tokens: int) -> int:
        return -(-tokens // self.page_tokens)

    def _span(self, ask: KvAsk) -> range:
        start = max(ask.start, self.start)
        return range(start - self.start, max(start, min(ask.end, self.end)) - self.start)

    def _most(self, by_layer: list[int], ask: KvAsk) -> int:
        span = self._span(ask)
        return max(by_layer[span.start : span.stop], default=0)

    # Who is let in

    def expected_tokens(self, ask: KvAsk) -> int:
        """Tokens that a session is expected to come to hold."""
        return min(ask.most_tokens, ask.tokens + self.lengths.estimate(ask.client))

    def admit(self, ask: KvAsk, now_s: float, *, may_be_urgent: bool = True) -> str | None:
        """Let a session in, or return why there is no room for it.

        It is let in as urgent if it claims so, ``may_be_urgent``, and the headroom has room for its
        whole length; otherwise by its expected length. Raises ValueError for a session that is in
        already.
        """
        if ask.session in self._holders:
            raise ValueError(f"session {ask.session} holds KV already")
        whole = self._pages_of(ask.most_tokens)
        if whole > self.pages:
            return f"{ask.most_tokens} tokens asked, {self.capacity_tokens} is all there is"
        if may_be_urgent and self.fits_urgent(ask):
            self._let_in(ask, whole, urgent=True)
            return None
        expected = self._pages_of(self.expected_tokens(ask))
        charged = self._most(self._charged_with_returns(ask, now_s), ask)
        free = self.pages - charged
        if expected > max(0, free):
            return f"{self.expected_tokens(ask)} tokens expected, {self._tokens(free)} are free"
        if takes_headroom(expected, free, charged):
            return f"{self._tokens(free)} tokens of KV are free, some kept for urgent requests"
        self._let_in(ask, expected, urgent=False)
        return None

    def who_makes_room(self, ask: KvAsk, now_s: float) -> list[str]:
        """Sessions of other clients that should give way so that ``ask`` is let in; none if even
        all that may give way would not suffice."""
        expected = self._pages_of(self.expected_tokens(ask))
        if self._pages_of(ask.most_tokens) > self.pages:
            return []
        charged, shares = self._charged_with_returns(ask, now_s), self._shares()
        kept = self._kept_before(ask, shares)
        oldest, span = self._oldest, set(self._span(ask))
        rivals = [
            each
            for each in self._holders.values()
            if each is not oldest and not each.urgent and span.intersection(self._span(each.ask))
        ]
        leaving: list[str] = []
        while not self._fits(expected, self._most(charged, ask)):
            newest = max(
                rivals, key=lambda each: (shares[each.ask.client], each.number), default=None
            )
            if newest is None:
                return []
            shares[newest.ask.client] -= newest.charged * len(self._span(newest.ask))
            if shares[newest.ask.client] < kept:
                return []
            rivals.remove(newest)
            leaving.append(newest.ask.session)
            self._add(charged, newest.ask, -newest.charged)
        return leaving

    def _fits(self, expected: int, charged: int) -> bool:
        free = self.pages - charged
        return expected <= max(0, free) and not takes_headroom(expected, free, charged)

    def _shares(self) -> Counter[str]:
        """Pages times layers that each client is charged with."""
        shares: Counter[str] = Counter()
        for each in self._holders.values():
            shares[each.ask.client] += each.charged * len(self._span(each.ask))
        return shares

    def _kept_before(self, ask: KvAsk, shares: Counter[str]) -> float:
        """The share that another client keeps when its sessions make room for ``ask``."""
        expected = self._pages_of(self.expected_tokens(ask))
        would_have = shares[ask.client] + expected * len(self._span(ask))
        return max(ADMISSION.crowd_times * would_have, ADMISSION.crowd_part * shares.total())

    def fits_urgent(self, ask: KvAsk) -> bool:
        """Whether a session claims to be urgent, and would get its whole length for it."""
        if ask.claim is None:
            return False
        whole = self._pages_of(ask.most_tokens)
        promised, claimed = [0] * len(self._held), [0] * len(self._held)
        oldest = self._oldest
        for holder in self._holders.values():  # what others than the oldest borrow is given back
            self._add(promised, holder.ask, holder.charged if holder is oldest else holder.promised)
            if holder.ask.claim is ask.claim:
                self._add(claimed, holder.ask, holder.promised)
        held = self._most(promised, ask)
        free = self.pages - held
        return whole <= free and claim_fits(whole, free, held, self._most(claimed, ask))

    def _charged_with_returns(self, ask: KvAsk, now_s: float) -> list[int]:
        """Pages charged, by layer, with the room left for others that gave way.

        Room is left for a client only until it would have so much that its sessions make room for
        ``ask``. If ``ask`` is of a session that gave way itself, only the room of those before it
        is left.
        """
        mine = self._returns.get((ask.client, ask.name))
        shares = self._shares() if self._returns else Counter[str]()
        kept = self._kept_before(ask, shares)
        charged = list(self._charged)
        for key, each in list(self._returns.items()):
            if each is mine:
                self._returns[key] = replace(mine, until_s=now_s + ADMISSION.return_s)
                break
            if now_s >= each.until_s:
                del self._returns[key]
                continue
            if shares[each.ask.client] < kept:
                self._add(charged, each.ask, each.promised)
                shares[each.ask.client] += each.promised * len(self._span(each.ask))
        return charged

    def _tokens(self, pages: int) -> int:
        return max(0, pages) * self.page_tokens

    def _let_in(self, ask: KvAsk, promised: int, *, urgent: bool) -> None:
        self._returns.pop((ask.client, ask.name), None)
        self._holders[ask.session] = _Holder(
            ask=ask, number=self._numbers, urgent=urgent, promised=promised
        )
        self._numbers += 1
        self._add(self._charged, ask, promised)

    @property
    def _oldest(self) -> _Holder | None:
        return next((each for each in self._holders.values() if not each.urgent), None)

    def _add(self, by_layer: list[int], ask: KvAsk, pages: int) -> None:
        if pages:
            for at in self._span(ask):
                by_layer[at] += pages

    # Who takes pages, and who gives way

    def grow(self, session: str, tokens: int) -> bool:
        """Take pages for a session's first ``tokens`` tokens; False, and nothing taken, if some
        layer has too few, or no page is free on all of the session's layers.

        Raises KeyError for an unknown session, ValueError beyond its whole length.
        """
        holder = self._holders[session]
        if tokens > holder.ask.most_tokens:
            raise ValueError(f"{tokens} tokens asked, {holder.ask.most_tokens} at most")
        more = self._pages_of(tokens) - holder.held
        if more > 0 and self._most(self._held, holder.ask) + more > self.pages:
            return False
        if not self.give(session, tokens):
            return False
        holder.tokens = max(holder.tokens, tokens)
        if more > 0:
            before = holder.charged
            holder.held += more
            self._add(self._held, holder.ask, more)
            self._add(self._charged, holder.ask, holder.charged - before)
        return True

    def who_gives_way(self, session: str, tokens: int) -> str | None:
        """The session whose pages should be freed so that ``session`` can grow to ``tokens``.

        None: no other; ``session`` waits until some end. Raises KeyError for an unknown session.
        """
        asking, oldest = self._holders[session], self._oldest
        more = self._pages_of(tokens) - asking.held
        span = self._span(asking.ask)
        # Where none is full, the same page must be free on all layers of the span.
        full = [at for at in span if self._held[at] + more > self.pages] or list(span)
        rivals = [
            each
            for each in self._holders.values()
            if each not in (asking, oldest)
            and not each.urgent
            and each.held > 0
            and any(at in self._span(each.ask) for at in full)
        ]  # by age, the oldest first
        borrowers = [each for each in rivals if each.borrowed]
        entitled = asking is oldest or asking.held + more <= asking.promised
        if entitled and not borrowers:
            # The oldest asks, or has what lacks: the newest session gives way, or waits.
            waits = [] if asking is oldest or asking.urgent else [asking]
            newest = max((*rivals, *waits), key=lambda each: each.number, default=asking)
            return None if newest is asking else newest.ask.session
        among = borrowers if entitled else [*borrowers, asking]
        beside = self._borrowed_beside()
        chosen = max(among, key=lambda each: (beside.get(each.ask.client, 0), each.number))
        return None if chosen is asking else chosen.ask.session

    def _borrowed_beside(self) -> dict[str, int]:
        """Pages times layers that each client borrows with sessions after its oldest borrower."""
        beside: dict[str, int] = {}
        for each in self._holders.values():
            if each.borrowed:
                client, more = each.ask.client, each.borrowed * len(self._span(each.ask))
                beside[client] = beside[client] + more if client in beside else 0
        return beside

    def free(self, session: str, answered_tokens: int | None = None) -> None:
        """Free what a session holds; an unknown one is ignored.

        ``answered_tokens`` is the length of its answer here; None: as far as it took pages.
        """
        holder = self._holders.get(session)
        if holder is None:
            return
        self._drop(holder)
        if answered_tokens is None:
            answered_tokens = holder.tokens - holder.ask.tokens + 1  # the last one is never run
        if holder.tokens >= holder.ask.tokens:
            self.lengths.ended(holder.ask.client, answered_tokens)

    def _drop(self, holder: _Holder) -> None:
        del self._holders[holder.ask.session]
        self._add(self._held, holder.ask, -holder.held)
        self._add(self._charged, holder.ask, -holder.charged)

    def give_way(self, session: str, now_s: float) -> None:
        """Free what a session holds, and leave it room for a while; an unknown one is ignored."""
        holder = self._holders.get(session)
        if holder is None:
            return
        self._drop(holder)
        known = holder.held * self.page_tokens
        wanted = min(holder.ask.most_tokens, known + self.lengths.estimate(holder.ask.client))
        self._returns[holder.ask.client, holder.ask.name] = _Return(
            ask=holder.ask, promised=self._pages_of(wanted), until_s=now_s + ADMISSION.return_s
        )
        if len(self._returns) > ADMISSION.returns_max:
            del self._returns[next(iter(self._returns))]
