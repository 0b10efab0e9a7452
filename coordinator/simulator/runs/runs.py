"""Runs: observers of the engine that send requests and count results."""

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from coordinator.simulator.clients import RequestScheduler
from coordinator.simulator.core.parts import SimulatedSession, Stage
from coordinator.simulator.core.report import LinkUse, PeerUse, SimulationReport, latency
from coordinator.simulator.core.swarm import Observer
from coordinator.simulator.core.trace import Request
from coordinator.simulator.runs.kv_peaks import KvPeaks


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """When requests try again, and how a run is sampled; times in simulated seconds."""

    waits_s: float = 5.0
    """Maximum time that a session waits for KV where it is; then it gives way itself."""
    knock_s: float = 0.5
    """Interval at which refused requests try again: the least that a stage asks for."""
    sample_s: float = 1.0
    """Interval at which KV use and sessions in flight are sampled."""
    bucket_s: float = 10.0
    told_every_s: float = 60.0
    """Interval at which progress is told and a run looks whether it is over."""
    drain_s: float = 4 * 3600.0
    """Maximum time after ``end_s`` until the last request is served."""


RUN = RunConfig()


class Simulation(Protocol):
    """What a run needs of a simulated swarm."""

    now_s: float
    peers: Any
    links: Any

    def call_at(self, at_s: float, call: Callable[[], None]) -> None: ...

    def open(
        self, session: SimulatedSession, stages: Sequence[Stage], tokens: int | None = None
    ) -> None: ...

    def place(self, session: SimulatedSession, stages: Sequence[Stage]) -> None: ...

    def cancel(self, session: SimulatedSession) -> None: ...

    def go_round(self, session: SimulatedSession) -> None: ...

    def run(self, until_s: float, observer: Observer) -> int: ...


class Run:
    """Opens sessions and counts their tokens and latencies from ``start_s`` to ``end_s``."""

    def __init__(
        self,
        engine: Simulation,
        scheduler: RequestScheduler,
        *,
        start_s: float,
        end_s: float,
    ) -> None:
        self.engine = engine
        self.scheduler = scheduler
        self.start_s = start_s
        self.end_s = end_s
        self.live: dict[int, SimulatedSession] = {}
        self.opened = 0
        self.rejected = 0
        self.replays = 0
        self.lost: deque[SimulatedSession] = deque()
        self.waiting: dict[int, float] = {}
        """Since when sessions wait for KV, by number, the longest first."""
        self.sessions_done = 0
        self.prompt_tokens = 0
        self.prompt_s: list[float] = []
        self.decode_s: list[float] = []
        self.tokens_by_bucket: dict[int, int] = {}
        self.live_samples: list[int] = []
        self._kv_peaks = KvPeaks()

    # Sessions

    def open(self, request: Request, arrival_s: float) -> bool:
        """Open a session for a request; returns False if there is no route."""
        session = SimulatedSession(self.opened, request, arrival_s)
        stages = self.scheduler.route(session, self.engine.now_s)
        if stages is None:
            return False
        self.opened += 1
        self.live[session.number] = session
        self.engine.open(session, stages)
        return True

    def lose(self, session: SimulatedSession) -> None:
        """Take a session off its route; it is replayed when a route has room."""
        self.engine.cancel(session)
        self.scheduler.ended(session)
        self.waiting.pop(session.number, None)
        self.lost.append(session)

    def replay_lost(self) -> bool:
        """Replay the prompts and answers so far of lost sessions over other routes, in order;
        returns whether none is left."""
        while self.lost:
            session = self.lost[0]
            session.replays += 1
            stages = self.scheduler.route(session, self.engine.now_s)
            if stages is None:
                session.replays -= 1
                return False
            self.lost.popleft()
            self.replays += 1
            session.tokens_in_kv = 0
            done = session.output_tokens - session.left_tokens
            self.engine.open(session, stages, session.input_tokens + done)
        return True

    def _account(self, session: SimulatedSession) -> None:
        """Let a session take the KV of its next token; others may have to give way."""
        now_s = self.engine.now_s
        grown = self.scheduler.decode(session, now_s)
        for number in grown.victims:
            self.lose(self.live[number])
        if grown.waits:
            session.waits = True
            self.waiting.setdefault(session.number, now_s)

    def let_on(self) -> None:
        """Let sessions that wait for KV go on, the one that waits longest first.

        One that has waited for long gives way itself: several may wait for each other.
        """
        for number, since_s in list(self.waiting.items()):
            session = self.live[number]
            if number not in self.waiting:
                continue  # it gave way meanwhile
            session.waits = False
            self._account(session)
            if not session.waits:
                self.waiting.pop(number, None)
                self.engine.go_round(session)
            elif self.engine.now_s - since_s > RUN.waits_s:
                self.lose(session)

    # Called by the engine

    def prompt_done(self, session: SimulatedSession, now_s: float) -> None:
        if session.replays == 0 and self.start_s <= now_s <= self.end_s:
            self.prompt_s.append(now_s - session.arrival_s)
            self.prompt_tokens += session.input_tokens
        self._account(session)
        self.after_prompt(now_s)

    def token_done(self, session: SimulatedSession, now_s: float, issued_s: float) -> None:
        if self.start_s <= now_s <= self.end_s:
            self.decode_s.append(now_s - issued_s)
            bucket = int(now_s / RUN.bucket_s)
            self.tokens_by_bucket[bucket] = self.tokens_by_bucket.get(bucket, 0) + 1
        if session.left_tokens:
            self._account(session)

    def session_done(self, session: SimulatedSession, now_s: float) -> None:
        self.sessions_done += 1
        del self.live[session.number]
        self.scheduler.ended(session)
        self.let_on()
        self.after_session(now_s)

    def after_prompt(self, now_s: float) -> None:
        """Called when a prompt has ended; a feeder may send another request."""

    def after_session(self, now_s: float) -> None:
        """Called when a session has ended; a feeder may send another request."""

    # Counts

    @property
    def all_done(self) -> bool:
        """Whether no request is left; those that are fed without end do not count."""
        return True

    def measure(self, progress: Callable[[float], None] | None = None) -> SimulationReport:
        """Run up to ``end_s`` and until all is done, for ``RUN.drain_s`` more at most; returns the
        report. ``progress`` is called with the share of the time up to ``end_s`` that is over."""
        engine, end_s = self.engine, self.end_s
        events = 0
        self.sample()
        while engine.now_s < end_s:
            events += engine.run(min(end_s, engine.now_s + RUN.told_every_s), self)
            if progress is not None:
                progress(engine.now_s / end_s)
        while not self.all_done and engine.now_s < end_s + RUN.drain_s:
            events += engine.run(engine.now_s + RUN.told_every_s, self)
        return self.report(events)

    def sample(self) -> None:
        """Sample KV use and sessions now, and again every ``RUN.sample_s``."""
        self._kv_peaks.look(self.live.values(), self.engine.peers)
        self.live_samples.append(len(self.live))
        self.engine.call_at(self.engine.now_s + RUN.sample_s, self.sample)

    def report(self, events: int) -> SimulationReport:
        """The report of the run; ``events`` is the engine's number of events."""
        measured_s = self.end_s - self.start_s
        return SimulationReport(
            decode_tokens_per_s=len(self.decode_s) / measured_s,
            prompt_tokens_per_s=self.prompt_tokens / measured_s,
            prompt=latency(self.prompt_s),
            decode=latency(self.decode_s),
            prompts_done=len(self.prompt_s),
            sessions_done=self.sessions_done,
            sessions_opened=self.opened,
            sessions_live=sum(self.live_samples) / max(1, len(self.live_samples)),
            rejected=self.rejected,
            replays=self.replays,
            measured_s=measured_s,
            simulated_s=self.engine.now_s,
            events=events,
            tokens_per_s_by_time=tuple(
                (bucket * RUN.bucket_s, count / RUN.bucket_s)
                for bucket, count in sorted(self.tokens_by_bucket.items())
            ),
            peers=peer_use(self.engine),
            links=link_use(self.engine),
        )


class Standing(Run):
    """An endless line of requests: each tries every ``RUN.knock_s`` until a route has room."""

    def __init__(
        self,
        engine: Simulation,
        scheduler: RequestScheduler,
        requests: Iterator[Request],
        *,
        start_s: float,
        end_s: float,
        sessions_max: float = math.inf,
    ) -> None:
        super().__init__(engine, scheduler, start_s=start_s, end_s=end_s)
        self._requests = requests
        self.sessions_max = sessions_max
        self._next = next(requests)
        engine.call_at(0.0, self._knock)

    def _knock(self) -> None:
        """Let the head of the line try again, as clients do that were refused."""
        self.let_on()
        self._feed()
        self.engine.call_at(self.engine.now_s + RUN.knock_s, self._knock)

    def place(self, session: SimulatedSession, done_tokens: int) -> bool:
        """Place a session in the middle of its answer; False: there is no room."""
        session.replays = 1  # however many prompts wait: its own has ended
        stages = self.scheduler.route(session, 0.0)
        session.replays = 0
        if stages is None:
            return False
        session.left_tokens -= done_tokens
        session.tokens_in_kv = session.input_tokens + done_tokens
        self.opened += 1
        self.live[session.number] = session
        self.engine.place(session, stages)
        self._account(session)
        return True

    def _feed(self) -> None:
        now_s = self.engine.now_s
        if not self.replay_lost():
            return
        while len(self.live) < self.sessions_max and now_s <= self.end_s:
            if not self.open(self._next, now_s):
                return
            self._next = next(self._requests)


class Arrivals(Run):
    """Requests at their arrival times; those without a route wait in line, in order."""

    def __init__(
        self,
        engine: Simulation,
        scheduler: RequestScheduler,
        requests: Sequence[Request],
        *,
        start_s: float,
        end_s: float,
    ) -> None:
        super().__init__(engine, scheduler, start_s=start_s, end_s=end_s)
        self.line: deque[Request] = deque()
        self.to_come = len(requests)
        engine.call_at(0.0, self._knock)
        for request in requests:
            engine.call_at(request.arrival_s, partial(self._arrive, request))

    def _arrive(self, request: Request) -> None:
        self.to_come -= 1
        self.line.append(request)
        self.serve_line()

    def _knock(self) -> None:
        """Let those in line try again, as clients do that were refused."""
        self.let_on()
        self.serve_line()
        if not self.all_done:
            self.engine.call_at(self.engine.now_s + RUN.knock_s, self._knock)

    def serve_line(self) -> None:
        """Open waiting sessions, lost ones first, until one finds no route."""
        if not self.replay_lost():
            return
        while self.line:
            if not self.open(self.line[0], self.line[0].arrival_s):
                return
            self.line.popleft()

    def after_session(self, now_s: float) -> None:
        self.serve_line()

    @property
    def all_done(self) -> bool:
        """Whether every request was served to its end."""
        return not (self.to_come or self.line or self.lost or self.live)


def peer_use(engine: Simulation) -> dict[str, PeerUse]:
    """The use of each peer over the simulated time."""
    span_s = max(engine.now_s, 1e-9)
    return {
        peer.name: PeerUse(
            start=peer.start,
            layers=peer.end - peer.start,
            busy=min(1.0, peer.busy_s / span_s),
            kv_peak=peer.kv_peak / max(1, peer.kv_capacity),
            tokens_per_step=peer.tokens_per_step,
        )
        for peer in engine.peers.values()
    }


def link_use(engine: Simulation) -> dict[tuple[str, str], LinkUse]:
    """The use of each link that carried a piece."""
    span_s = max(engine.now_s, 1e-9)
    return {
        pair: LinkUse(
            pieces=link.pieces,
            busy=min(1.0, link.busy_s / span_s),
            waited_s=link.waited_s / max(1, link.pieces),
        )
        for pair, link in engine.links.items()
    }
