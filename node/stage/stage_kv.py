"""Performs what :mod:`coordinator.policies.admission.room` decides on one engine's KV."""

from collections.abc import Callable, Iterable

from coordinator.policies.admission.room import KvAsk, KvRoom
from coordinator.policies.admission.rules import Claim
from dht.messages.session import Priority, SessionOpen
from node.kv.page_names import NO_NAMES, PageNames
from node.stage.config import StageEngine

WAIT_S = 6.0
"""Time that a session waits for KV before it gives way itself. It may hold, at another stage, KV
that a session waits for which holds the KV wanted here."""
RETURN_LEAST_S = 1.0
"""Least time for which a session that gave way is told to stay away."""


def claim_of(open_: SessionOpen) -> Claim | None:
    """Why an open says that it is urgent, if it does."""
    if open_.answered:
        return Claim.BEGUN
    return Claim.HIGH if open_.priority is Priority.HIGH else None


class StageKv:
    """The KV of one stage. Sessions are named as in the engine."""

    def __init__(self, engine: StageEngine) -> None:
        self.account: Callable[[str], str] = lambda client: client
        """The name under which a client's fair share counts, as in the table of sessions."""
        self._engine = engine
        self._shape = (0, 0, 0)
        self._room = KvRoom(start=0, end=0, pages=0)
        self._waiting_s: dict[str, float] = {}
        """Since when sessions wait for KV that they could not take."""

    @property
    def room(self) -> KvRoom:
        """The accounts, made anew once the engine has loaded other layers: no session holds any KV
        then."""
        view, size = self._engine.view, self._engine.page_tokens
        shape = view.start, view.end, self._engine.kv_tokens // size
        if shape != self._shape and view.start < view.end and not any(self._room):
            self._shape = shape
            lengths = self._room.lengths
            self._room = KvRoom(*shape, page_tokens=size, lengths=lengths, give=self._give)
        return self._room

    def _give(self, session: str, charged: int) -> bool:
        return self._engine.extend_kv(session, max(0, charged - self._engine.state_tokens))

    @property
    def waiting(self) -> int:
        return len(self._waiting_s)

    def ask_of(self, open_: SessionOpen, key: str) -> KvAsk:
        stage = open_.route[open_.hop]
        return KvAsk(
            session=key,
            client=self.account(open_.client),
            start=stage.start,
            end=stage.end,
            tokens=open_.prompt_tokens + self._engine.state_tokens,
            most_tokens=open_.prompt_tokens + open_.max_new_tokens - 1 + self._engine.state_tokens,
            claim=claim_of(open_),
            name=open_.session,
        )

    def admit(
        self, ask: KvAsk, now_s: float, *, may_be_urgent: bool, names: PageNames = NO_NAMES
    ) -> int | str:
        """Let a session in, or return why there is no room for it.

        Returns the number of its leading tokens whose KV is kept here under ``names``. It is
        charged as if nothing was: pages that nobody holds are free for all, and a session that
        shares pages with others may come to need its own.
        """
        refused = self.room.admit(ask, now_s, may_be_urgent=may_be_urgent)
        if refused is not None:
            return refused
        key, layers, state = ask.session, (ask.start, ask.end), self._engine.state_tokens
        likely, most = self.room.expected_tokens(ask) - state, ask.most_tokens - state
        found = self._engine.open_kv(key, most, layers, likely, names)
        if found and not self.room.grow(key, found + state):  # others borrow what is promised
            self._engine.free(key)
            return self._engine.open_kv(key, most, layers, likely)
        return found

    def take(self, session: str, tokens: int) -> bool:
        """Take KV for a session's first ``tokens`` tokens; False if too little is free."""
        room = self.room  # the engine refuses the work of one that is not there
        taken = session not in room or room.grow(session, tokens + self._engine.state_tokens)
        if taken:
            self._waiting_s.pop(session, None)
        return taken

    def who_gives_way(self, session: str, tokens: int) -> str | None:
        """The session that has to give way where :meth:`take` failed; None: ``session`` waits."""
        return self.room.who_gives_way(session, tokens + self._engine.state_tokens)

    def waits(self, session: str, now_s: float) -> None:
        """The session waits for KV from now on, unless it does already."""
        self._waiting_s.setdefault(session, now_s)

    def spare(self, session: str, tokens: int, more: int) -> int:
        """Take KV for up to ``more`` tokens behind a session's first ``tokens``, for which it has
        some.

        Returns for how many there was KV without others having to give way or wait.
        """
        room = self.room
        if session not in room or not more:
            return more
        charged = tokens + self._engine.state_tokens
        held = min(more, max(0, room.held_of(session) - charged))
        wanted = held if self._waiting_s else more
        for each in (wanted, held):
            if room.grow(session, charged + each):
                return each
        return 0

    def waits_no_more(self, session: str) -> None:
        """Forget that a session waits: what it wanted to run is forgotten."""
        self._waiting_s.pop(session, None)

    def oldest_first(self, sessions: Iterable[str]) -> list[str]:
        """``sessions`` in the order in which they were let in; without those that have ended."""
        wanted = set(sessions)
        return [session for session in self._room if session in wanted]

    def overdue(self, now_s: float) -> list[str]:
        """Sessions that have waited for too long."""
        return [key for key, since_s in self._waiting_s.items() if now_s - since_s >= WAIT_S]

    def free(self, session: str) -> None:
        """Free all that a session holds; harmless if that is nothing."""
        self._waiting_s.pop(session, None)
        self._room.free(session)
        self._engine.free(session)

    def give_way(self, session: str, now_s: float) -> None:
        """Free all that a session holds, and leave it room to come back."""
        self._waiting_s.pop(session, None)
        self._room.give_way(session, now_s)
        self._engine.free(session)
