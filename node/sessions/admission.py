"""Whom a stage has room for, and when one without expects to have some.

Pure. A share of the KV is kept for what is urgent: sessions of high priority, and those that lost a
stage elsewhere and come here with an answer begun (the headroom of Llumnix, OSDI'24, §4.4).
Every session holds its KV for its whole length, so room comes when sessions end; each is
taken to go on at the pace it had so far, to its longest possible answer.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

HEADROOM_SHARE = 0.1
"""Of a stage's KV and sessions: room that ordinary sessions leave free."""
QUEUE_SESSIONS_LEAST = 16
"""So many sessions are taken however long steps take: a slow peer is slow with one, too."""
QUEUE_WAIT_S = 0.2
"""A stage at which decodes take longer is as full as it need be: more sessions add no tokens, only
waiting. It is twice what prompts may take of a step (``DECODE_S_MAX``): the one that runs when a
decode comes, and the one that it is in."""
UNTRIED_SESSIONS = 32
"""So many whose first tokens are still to come are taken, or as many as decode already: a crowd
comes faster than its tokens, and what it does to the others shows with these."""
UNTRIED_S = 5.0
"""A session counts as untried for so long at most: its prompt is long, or nobody sends it."""
UNTRIED_PER_CLIENT = 16
"""So many of one client's count: none keeps all others out by opening what it does not use."""
QUEUE_PLACES = 4
"""Who is turned away by slow decodes comes back when so many sessions should have ended: a place
that nobody takes for a while costs no tokens there, but every refusal does."""
CROWD_S = 10.0
"""A client that was refused is counted among those who wait for so long."""
CROWD_MAX = 256
RETRY_LEAST_S = 0.5
RETRY_MOST_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """A session that holds KV here."""

    kv_tokens: int
    """What it will give back."""
    ran_tokens: int
    """How many of them it has run."""
    prompt_tokens: int = 0
    """How many of them came at once, and ran faster than the others will."""
    age_s: float

    @property
    def left_s(self) -> float:
        """How long it may still take, at its pace so far: of its new tokens, once there are any."""
        left = max(0, self.kv_tokens - self.ran_tokens)
        new = self.ran_tokens - self.prompt_tokens
        return left * self.age_s / max(1, new if new > 0 else self.ran_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLoad:
    """What the sessions that hold KV here amount to for a client that wants one more."""

    sessions: int = 0
    own: int = 0
    """The client's,"""
    own_urgent: int = 0
    """and those of them that are of high priority."""
    decoding: int = 0
    """Past their prompts."""
    untried: int = 0
    """Came lately and have no token yet, as far as they count (:func:`untried_of`)."""
    kv_tokens: int = 0
    """Promised to them."""


@dataclass(slots=True, kw_only=True)
class TurnedAway:
    """Clients that were refused lately. They should not all come back at once, for one place.

    At most ``CROWD_MAX`` are remembered.
    """

    since_s: dict[str, float] = field(default_factory=dict)

    def turn(self, client: str, now_s: float) -> int:
        """Note that ``client`` is refused; for how many there should be room when it comes back.

        Half of those who wait: some go elsewhere, and a place that nobody takes is lost.
        """
        self.since_s.pop(client, None)
        for other, at_s in list(self.since_s.items()):  # in the order of their times
            if now_s - at_s <= CROWD_S and len(self.since_s) < CROWD_MAX:
                break
            del self.since_s[other]
        self.since_s[client] = now_s
        return max(1, len(self.since_s) // 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """KV that was asked here and refused. Who was refused comes back, so there is no line: the
    newest stands for its head, whose demand counts as used (Llumnix §4.4.1)."""

    tokens: int = 0
    at_s: float = float("-inf")

    def wanted(self, now_s: float) -> int:
        """Tokens that are still wanted."""
        return self.tokens if now_s - self.at_s <= CROWD_S else 0


def headroom(capacity: int) -> int:
    """How much of ``capacity``, in tokens of KV or in sessions, ordinary sessions leave free."""
    return int(capacity * HEADROOM_SHARE)


def takes_headroom(needed_tokens: int, free_tokens: int, held_tokens: int) -> bool:
    """Whether a session of ``needed_tokens`` would cut into the room for urgent ones.

    A stage that holds nothing takes whatever fits: a session may be longer than all but the
    headroom, and would never be served otherwise.
    """
    return held_tokens > 0 and free_tokens - needed_tokens < headroom(free_tokens + held_tokens)


def queue_is_long(load: StageLoad, decode_p95_s: float | None) -> bool:
    """Whether ordinary sessions should go elsewhere although there is KV for them.

    ``decode_p95_s`` is the 95th percentile of what decodes took here lately, from their coming to
    the end of their step; None while unknown.
    """
    if load.sessions < QUEUE_SESSIONS_LEAST:
        return False
    is_slow = decode_p95_s is not None and decode_p95_s > QUEUE_WAIT_S
    return is_slow or load.untried >= max(UNTRIED_SESSIONS, load.decoding)


def untried_of(clients: Iterable[str]) -> int:
    """How many sessions count as untried, given the client of each."""
    return sum(min(count, UNTRIED_PER_CLIENT) for count in Counter(clients).values())


def retry_after_s(needed_tokens: int, free_tokens: int, holding: Iterable[Holding]) -> float:
    """Seconds until ``needed_tokens`` should be free; 0 when no end of sessions would do.

    With enough room the answer is the least wait: something else, such as a bound on sessions,
    stood in the way, and may be gone at once.
    """
    if free_tokens >= needed_tokens:
        return RETRY_LEAST_S
    for session in sorted(holding, key=lambda session: session.left_s):
        free_tokens += session.kv_tokens
        if free_tokens >= needed_tokens:
            return min(RETRY_MOST_S, max(RETRY_LEAST_S, session.left_s))
    return 0.0
