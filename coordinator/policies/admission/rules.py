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

from coordinator.policies.admission.config import ADMISSION


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
    rest_s: float = ADMISSION.rest_s
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
    """How often something happened in the last ``ADMISSION.rate_s``."""

    def __init__(self) -> None:
        self._at_s: deque[float] = deque(maxlen=ADMISSION.rate_most)

    def add(self, now_s: float) -> None:
        """Count one event."""
        self._at_s.append(now_s)

    def per_s(self, now_s: float) -> float:
        while self._at_s and now_s - self._at_s[0] > ADMISSION.rate_s:
            self._at_s.popleft()
        return len(self._at_s) / ADMISSION.rate_s


@dataclass(slots=True, kw_only=True)
class TurnedAway:
    """Clients refused lately, which should not all come back at once for one place.

    At most ``ADMISSION.crowd_max`` are remembered.
    """

    since_s: dict[str, float] = field(default_factory=dict)

    def turn(self, client: str, now_s: float) -> int:
        """Record the refusal of ``client``; returns for how many sessions there should be room when
        it comes back.

        Half of the waiting clients: some go elsewhere, and a place that nobody takes is lost.
        """
        self.since_s.pop(client, None)
        for other, at_s in list(self.since_s.items()):  # oldest first
            if now_s - at_s <= ADMISSION.crowd_s and len(self.since_s) < ADMISSION.crowd_max:
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
        return self.tokens if now_s - self.at_s <= ADMISSION.crowd_s else 0


def headroom(capacity: int) -> int:
    """How much of ``capacity``, in KV tokens or in sessions, ordinary sessions leave free."""
    return int(capacity * ADMISSION.headroom_share)


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
    return cut <= 0 or taken + cut <= ADMISSION.claim_share * kept


def queue_is_long(load: StageLoad, decode_p95_s: float | None) -> bool:
    """Whether ordinary sessions should go elsewhere although there is KV for them.

    ``decode_p95_s`` is the 95th percentile of recent times from a decode's arrival to the end of
    its step; None while unknown.
    """
    return decodes_wait(load, decode_p95_s) or prompts_wait(load)


def decodes_wait(load: StageLoad, decode_p95_s: float | None) -> bool:
    """Whether decodes wait so long that one more session would only make them wait longer."""
    is_slow = decode_p95_s is not None and decode_p95_s > ADMISSION.queue_wait_s
    return is_slow and load.seen >= ADMISSION.queue_sessions_least


def prompts_wait(load: StageLoad) -> bool:
    """Whether one more prompt would only make the others wait longer."""
    return load.untried >= max(
        ADMISSION.untried_sessions, ADMISSION.prompts_wait_s * load.prompts_per_s
    )


def prompt_turn_s(load: StageLoad, turn: int) -> float:
    """Seconds until ``turn`` prompts should have ended where prompts wait.

    The rate of late counts once as many ended as wait: before a crowd few came, so few ended.
    """
    per_s = load.prompts_per_s
    if per_s * ADMISSION.rate_s < load.untried:
        per_s = load.untried / ADMISSION.prompts_wait_s
    return min(ADMISSION.retry_most_s, max(ADMISSION.retry_least_s, turn / per_s))


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
    return ADMISSION.untried_s + ran_tokens / ADMISSION.prompt_tokens_per_s


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
        return ADMISSION.retry_least_s
    for session in sorted(holding, key=lambda session: session.left_s):
        free_tokens += session.kv_tokens
        if free_tokens >= needed_tokens:
            return min(ADMISSION.retry_most_s, max(ADMISSION.retry_least_s, session.left_s))
    return 0.0
