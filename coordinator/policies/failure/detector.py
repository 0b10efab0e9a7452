"""Detects dead peers: killed, stopped, black-holed, or far too slow.

With libp2p the loss of a killed peer shows in a fraction of a second, that of a black-holed one
after 39 s, and that of a stopped process never, so the detector relies on no broken connection. A
peer is dead when it is silent despite pings, or reports its engine in one step, for longer than
``max(2 s, 5 × p95 of its step)``, at most 5 s.

Pure: the time is an argument. The shells ask :attr:`PeerWatch.wake_at_s` when to call
:meth:`PeerWatch.tick` next.
"""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

SAMPLES_MAX = 64
SAMPLES_LEAST = 8
"""Minimum samples for a percentile; with fewer, a peer gets the longest deadline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchConfig:
    """Times in seconds."""

    ping_every_s: float = 0.5
    least_s: float = 2.0
    most_s: float = 5.0
    factor: float = 5.0
    """Multiple of the 95th percentile at which a step counts as stuck, not slow."""
    late_s: float = 0.3
    """Delay of a tick above which this process, not the peer, was stalled."""
    known_token_s: float = 0.1
    """Longest time of a token that is known already. Where stages are new they run all of these, so
    the others of the route wait so much longer for the first new one."""


class StepTimes:
    """The last durations of a step or round trip, and their 95th percentile (nearest rank)."""

    def __init__(self) -> None:
        self._samples_s: deque[float] = deque(maxlen=SAMPLES_MAX)

    def add(self, duration_s: float) -> None:
        """Add a duration; the oldest of 64 is dropped."""
        self._samples_s.append(max(0.0, duration_s))

    def add_all(self, durations_s: Iterable[float]) -> None:
        """Add durations, none below 0."""
        self._samples_s.extend(durations_s)

    @property
    def p95_s(self) -> float | None:
        """The 95th percentile; None while fewer than 8 durations are known."""
        if len(self._samples_s) < SAMPLES_LEAST:
            return None
        ordered = sorted(self._samples_s)
        return ordered[math.ceil(0.95 * len(ordered)) - 1]


def deadline_s(p95_s: float | None, config: WatchConfig) -> float:
    """Time limit of a step before its peer is given up; ``p95_s`` None: the pace is unknown."""
    if p95_s is None or not math.isfinite(p95_s):
        return config.most_s
    return min(config.most_s, max(config.least_s, config.factor * p95_s))


@dataclass(slots=True, kw_only=True)
class EnginePace:
    """The pace of this peer's engine, which pongs report to the peers that wait for it.

    Items of work are counted by session, since the end of a session drops its queued items. Steps
    with chunks of prompts have times of their own: they take many times as long as decodes.
    """

    steps: StepTimes = field(default_factory=StepTimes)
    chunks: StepTimes = field(default_factory=StepTimes)
    """Durations of the steps with rows of a prompt among ``steps``."""
    _outstanding: dict[str, int] = field(default_factory=dict)
    _prompts: set[str] = field(default_factory=set)
    """Sessions with a chunk that is queued or runs."""
    _since_s: float = 0.0
    """When the engine was last idle or finished a step."""

    @property
    def p95_s(self) -> float | None:
        """95th percentile of steps such as may run now; None while too few are known."""
        return (self.chunks if self._prompts else self.steps).p95_s

    def submitted(self, session: str, now_s: float, *, decodes: bool = True) -> None:
        """Count one queued item of work; ``decodes``: whether it is no chunk of a prompt."""
        if not decodes:
            self._prompts.add(session)
        if not self._outstanding:
            self._since_s = now_s
        self._outstanding[session] = self._outstanding.get(session, 0) + 1

    def finished(self, sessions: list[str], now_s: float, *, decodes: bool = True) -> float:
        """Count a finished step with an item of each of ``sessions``; returns its duration.

        ``decodes``: whether it ran no rows of a prompt.
        """
        took_s = max(0.0, now_s - self._since_s)
        self.steps.add(took_s)
        if not decodes:
            self.chunks.add(took_s)
        self._since_s = now_s
        for session in sessions:
            left = self._outstanding.pop(session, 0) - 1
            if left > 0:
                self._outstanding[session] = left
            else:
                self._prompts.discard(session)
        return took_s

    def has_work(self, session: str) -> bool:
        """Whether an item of the session is queued or runs."""
        return session in self._outstanding

    def dropped(self, session: str) -> None:
        """Forget a session that ended; its queued items are not run."""
        self._outstanding.pop(session, None)
        self._prompts.discard(session)

    def stalled_s(self, now_s: float) -> float:
        """Seconds since the engine began its present step; 0 when it is idle."""
        return max(0.0, now_s - self._since_s) if self._outstanding else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Dead:
    """The watched peer is given up for ``reason``."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PingNow:
    """Send a ping with this nonce."""

    nonce: int


@dataclass(slots=True, kw_only=True)
class PeerWatch:
    """Watches one peer over one stream.

    A late tick shifts every deadline by its delay: a process that was stopped itself blames nobody.
    """

    config: WatchConfig
    heard_s: float
    """When the peer was last heard; the present time at the beginning."""
    wake_at_s: float = 0.0
    """When to call :meth:`tick` next; an earlier call is harmless."""
    _nonce: int = 0
    _sent_s: dict[int, float] = field(default_factory=dict)
    _round_trips: StepTimes = field(default_factory=StepTimes)
    _ping_at_s: float = 0.0
    _stalled_since_s: float | None = None
    """When the peer's engine began its present step, by this process's clock."""
    _step_p95_s: float | None = None

    def __post_init__(self) -> None:
        self._ping_at_s = self.wake_at_s = self.heard_s

    @property
    def limit_s(self) -> float:
        """The present deadline for an answer, by the slower of the peer's steps and its ping round
        trips."""
        known = [p for p in (self._step_p95_s, self._round_trips.p95_s) if p is not None]
        return deadline_s(max(known) if known else None, self.config)

    @property
    def step_limit_s(self) -> float:
        """The present deadline for a step: the longest while the pace of such steps is unknown."""
        return self.limit_s if self._step_p95_s is not None else self.config.most_s

    def heard(self, now_s: float) -> None:
        self.heard_s = max(self.heard_s, now_s)

    def answered(
        self, nonce: int, stalled_s: float, step_p95_s: float | None, now_s: float
    ) -> None:
        """Record a pong: the time that the peer's engine spent in its present step, and its p95."""
        self.heard(now_s)
        sent_s = self._sent_s.pop(nonce, None)
        if sent_s is None:
            return  # never asked, or answered twice
        self._round_trips.add(now_s - sent_s)
        self._step_p95_s = step_p95_s
        self._stalled_since_s = now_s - stalled_s if stalled_s > 0 else None

    def unused(self, now_s: float) -> None:
        """Record that nobody waits for the peer now: silence counts from the next use on."""
        self.heard_s = now_s
        self._stalled_since_s = None
        self._sent_s.clear()
        self._ping_at_s = self.wake_at_s = now_s + self.config.ping_every_s

    def tick(self, now_s: float) -> Dead | PingNow | None:
        """The next action, None: nothing to do. Sets :attr:`wake_at_s`."""
        late_s = now_s - self.wake_at_s
        if late_s > self.config.late_s:
            self._shift(late_s, now_s)
        if (dead := self._dead(now_s)) is not None:
            return dead
        ping = None
        if now_s >= self._ping_at_s:
            self._nonce += 1
            self._ping_at_s = now_s + self.config.ping_every_s
            self._sent_s[self._nonce] = now_s
            while len(self._sent_s) > SAMPLES_MAX:
                del self._sent_s[next(iter(self._sent_s))]
            ping = PingNow(nonce=self._nonce)
        self.wake_at_s = min(self._ping_at_s, self._dead_at_s())
        return ping

    def _dead_at_s(self) -> float:
        silent_s = self.heard_s + self.limit_s
        if self._stalled_since_s is None:
            return silent_s
        return min(silent_s, self._stalled_since_s + self.step_limit_s)

    def _dead(self, now_s: float) -> Dead | None:
        # The same sums as in wake_at_s: a difference could round to just below the limit.
        if now_s >= self.heard_s + self.limit_s:
            return Dead(reason=f"silent for {now_s - self.heard_s:.1f} s")
        limit_s = self.step_limit_s
        if self._stalled_since_s is not None and now_s >= self._stalled_since_s + limit_s:
            stalled_s = now_s - self._stalled_since_s
            return Dead(
                reason=f"too slow: {stalled_s:.1f} s in one step, the limit is {limit_s:.1f}"
            )
        return None

    def _shift(self, by_s: float, now_s: float) -> None:
        self.heard_s = min(now_s, self.heard_s + by_s)
        if self._stalled_since_s is not None:
            self._stalled_since_s = min(now_s, self._stalled_since_s + by_s)
        self._sent_s = {nonce: sent_s + by_s for nonce, sent_s in self._sent_s.items()}
