"""Decides which sessions a stage has room for, and when it expects room for a refused one. Pure.

A share of the KV is kept for urgent sessions: those of high priority, and those that lost a stage
elsewhere and come here with an answer begun (the headroom of Llumnix, OSDI'24, §4.4). A session
holds KV for its whole length, so room comes when sessions end. Each session is assumed to go on at
its pace so far, to its longest possible answer.
"""

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

HEADROOM_SHARE = 0.1
"""Share of a stage's KV, and of its sessions, that ordinary sessions leave free."""
CLAIM_SHARE = 0.75
"""Share of the headroom that all sessions with one claim may take together. Nothing proves a claim:
a client may say that its answer began elsewhere, and clients and peers to vouch for it cost
nothing. So a crowd with one claim leaves room for those with the other."""
QUEUE_SESSIONS_LEAST = 16
"""Minimum number of sessions that a stage takes, however long its steps take: a slow peer is slow
with one session, too."""
QUEUE_WAIT_S = 0.2
"""Decode time, in seconds, above which a stage is full: more sessions add no tokens, only waiting.
Twice the time that prompts may take in a step (``DECODE_S_MAX``): a decode waits for the step that
runs when it comes, and for its own."""
UNTRIED_SESSIONS = 32
"""Maximum number of untried sessions, as a client sees them, while few prompts end. A crowd comes
faster than its tokens; its effect on other sessions shows with this many."""
UNTRIED_S = 5.0
"""Time from its open in which a session counts as untried whether or not rows of its prompt wait
here; :func:`may_wait_s` adds to it."""
PROMPT_TOKENS_PER_S = 20.0
"""Pace below which a prompt waits for its client, not for the stages."""
PROMPTS_WAIT_S = 10.0
"""Time in which the prompts of the untried sessions should end, at the rate of late: beyond it a
stage takes no more of them. They would hold KV and wait, and bring no more tokens."""
RATE_S = 30.0
"""Time over which a rate is counted."""
RATE_MOST = 4096
"""Maximum events that a rate is counted from."""
REST_S = 10.0
"""A session without progress for ``REST_S`` *rests*, and gives way to any that finds no room."""
CROWD_REST_S = 1.0
"""Like ``REST_S``, for a session that has run nothing, if the client that finds no room has fewer
such sessions."""
QUEUE_PLACES = 4
"""Number of sessions that should have ended before a client refused for slow decodes comes back. A
place that stays empty for a while costs no tokens there; every refusal does."""
CROWD_S = 10.0
"""A refused client counts as waiting for ``CROWD_S``."""
CROWD_MAX = 256
RETRY_LEAST_S = 0.5
RETRY_MOST_S = 600.0


class Claim(StrEnum):
    """Why a session says that it is urgent."""

    HIGH = "high"
    """Its client gives it high priority."""
    BEGUN = "begun"
    """It comes with an answer begun, as after the loss of a stage elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """A session that holds KV here."""

    kv_tokens: int
    """KV tokens that the session frees when it ends."""
    ran_tokens: int
    """Number of tokens that the session has run."""
    prompt_tokens: int = 0
    """Number of prompt tokens, which came at once and ran faster than the others will."""
    age_s: float
    rest_s: float = REST_S
    """Time without progress after which the session rests."""

    @property
    def left_s(self) -> float:
        """Longest remaining time at the pace so far: that of its new tokens, once it has any.

        A session that has run nothing begins, or gives way because it rests.
        """
        if self.ran_tokens == 0:
            return max(0.0, self.rest_s - self.age_s)
        left = max(0, self.kv_tokens - self.ran_tokens)
        new = self.ran_tokens - self.prompt_tokens
        return left * self.age_s / (new if new > 0 else self.ran_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLoad:
    """Load of the sessions that hold KV here, as seen by one client that wants one more."""

    sessions: int = 0
    seen: int = 0
    """Number of sessions as the client sees them (:func:`seen_by`)."""
    own: int = 0
    """Number of the client's sessions."""
    own_urgent: int = 0
    """Number of the client's high-priority sessions."""
    urgent: int = 0
    """Number of all clients' sessions whose high priority was granted."""
    claimed: int = 0
    """Number of sessions that came with the client's claim to be urgent."""
    untried: int = 0
    """Number of sessions without a token, as the client sees them (:func:`seen_by`)."""
    prompts_per_s: float = 0.0
    """Rate at which prompts ended here lately."""


class RecentRate:
    """How often something happened in the last ``RATE_S``."""

    def __init__(self) -> None:
        self._at_s: deque[float] = deque(maxlen=RATE_MOST)

    def add(self, now_s: float) -> None:
        """Count one event."""
        self._at_s.append(now_s)

    def per_s(self, now_s: float) -> float:
        """Events per second."""
        while self._at_s and now_s - self._at_s[0] > RATE_S:
            self._at_s.popleft()
        return len(self._at_s) / RATE_S


@dataclass(slots=True, kw_only=True)
class TurnedAway:
    """Clients refused lately, which should not all come back at once for one place.

    At most ``CROWD_MAX`` are remembered.
    """

    since_s: dict[str, float] = field(default_factory=dict)

    def turn(self, client: str, now_s: float) -> int:
        """Record the refusal of ``client``; returns for how many sessions there should be room when
        it comes back.

        Half of the waiting clients: some go elsewhere, and a place that nobody takes is lost.
        """
        self.since_s.pop(client, None)
        for other, at_s in list(self.since_s.items()):  # oldest first
            if now_s - at_s <= CROWD_S and len(self.since_s) < CROWD_MAX:
                break
            del self.since_s[other]
        self.since_s[client] = now_s
        return max(1, len(self.since_s) // 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """KV that was asked for here and refused.

    Refused clients come back by themselves, so there is no queue: the newest refusal stands for the
    head of a queue, whose demand counts as used (Llumnix §4.4.1).
    """

    tokens: int = 0
    at_s: float = float("-inf")

    def wanted(self, now_s: float) -> int:
        """KV tokens still wanted."""
        return self.tokens if now_s - self.at_s <= CROWD_S else 0


def headroom(capacity: int) -> int:
    """How much of ``capacity``, in KV tokens or in sessions, ordinary sessions leave free."""
    return int(capacity * HEADROOM_SHARE)


def takes_headroom(needed_tokens: int, free_tokens: int, held_tokens: int) -> bool:
    """Whether a session of ``needed_tokens`` would cut into the room for urgent sessions.

    A stage that holds nothing takes whatever fits: a session longer than all but the headroom would
    otherwise never be served.
    """
    return held_tokens > 0 and free_tokens - needed_tokens < headroom(free_tokens + held_tokens)


def claim_fits(needed: int, free: int, held: int, claimed: int) -> bool:
    """Whether a session that claims to be urgent has room, in KV tokens or in sessions.

    ``claimed`` of what is ``held`` went to sessions with the same claim. As much of it as lacks in
    the headroom counts as taken there.
    """
    kept = headroom(free + held)
    taken = min(claimed, max(0, kept - free))
    cut = needed - max(0, free - kept)
    return cut <= 0 or taken + cut <= CLAIM_SHARE * kept


def queue_is_long(load: StageLoad, decode_p95_s: float | None) -> bool:
    """Whether ordinary sessions should go elsewhere although there is KV for them.

    ``decode_p95_s`` is the 95th percentile of recent times from a decode's arrival to the end of
    its step; None while unknown.
    """
    return decodes_wait(load, decode_p95_s) or prompts_wait(load)


def decodes_wait(load: StageLoad, decode_p95_s: float | None) -> bool:
    """Whether decodes wait so long that one more session would only make them wait longer."""
    is_slow = decode_p95_s is not None and decode_p95_s > QUEUE_WAIT_S
    return is_slow and load.seen >= QUEUE_SESSIONS_LEAST


def prompts_wait(load: StageLoad) -> bool:
    """Whether one more prompt would only make the others wait longer."""
    return load.untried >= max(UNTRIED_SESSIONS, PROMPTS_WAIT_S * load.prompts_per_s)


def prompt_turn_s(load: StageLoad, turn: int) -> float:
    """Seconds until ``turn`` prompts should have ended where prompts wait."""
    per_s = load.prompts_per_s or load.untried / PROMPTS_WAIT_S
    return min(RETRY_MOST_S, max(RETRY_LEAST_S, turn / per_s))


def first_to_give_way(resting: Iterable[tuple[str, str]]) -> list[str]:
    """Resting sessions in the order in which they give way.

    ``resting`` has the session and its client, the longest rest first. A client that has more of
    them than others gives up those beyond theirs first.
    """
    turns: Counter[str] = Counter()
    queue: list[tuple[int, int, str]] = []
    for place, (session, client) in enumerate(resting):
        queue.append((-turns[client], place, session))
        turns[client] += 1
    return [session for _, _, session in sorted(queue)]


def may_wait_s(ran_tokens: int) -> float:
    """Time from its open in which a session without a token counts as untried though no rows of it
    wait here: those that ran, ``ran_tokens``, may wait for links and other stages."""
    return UNTRIED_S + ran_tokens / PROMPT_TOKENS_PER_S


def seen_by(client: str, clients: Iterable[str]) -> int:
    """Number of sessions as ``client`` sees them, given the client of each.

    Others count with as many as ``client`` would have with one more: who has many keeps out itself
    before those with few.
    """
    counts = Counter(clients)
    most = counts[client] + 1
    return sum(min(count, most) for count in counts.values())


def retry_after_s(needed_tokens: int, free_tokens: int, holding: Iterable[Holding]) -> float:
    """Seconds until ``needed_tokens`` should be free; 0 if no end of sessions would suffice.

    With enough room the answer is the minimum wait: another bound, such as that on sessions, caused
    the refusal and may be gone at once.
    """
    if free_tokens >= needed_tokens:
        return RETRY_LEAST_S
    for session in sorted(holding, key=lambda session: session.left_s):
        free_tokens += session.kv_tokens
        if free_tokens >= needed_tokens:
            return min(RETRY_MOST_S, max(RETRY_LEAST_S, session.left_s))
    return 0.0
