"""Runs: observers of the engine that send requests and count results."""

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

from coordinator.simulator.clients import RequestScheduler
from coordinator.simulator.core.parts import SimulatedSession, Stage
from coordinator.simulator.core.report import LinkUse, PeerUse, SimulationReport, latency
from coordinator.simulator.core.trace import Request
from coordinator.simulator.runs.kv_peaks import KvPeaks

KNOCK_S = 0.5
"""Interval at which a refused request tries again, beside the ends of sessions."""
SAMPLE_S = 1.0
"""Interval at which KV use and sessions in flight are sampled."""
BUCKET_S = 10.0


class Simulation(Protocol):
    """What a run needs of a simulated swarm."""

    now_s: float
    peers: Any
    links: Any

    def call_at(self, at_s: float, call: Callable[[], None]) -> None: ...

    def open(
        self, session: SimulatedSession, stages: Sequence[Stage], tokens: int | None = None
    ) -> None: ...

    def cancel(self, session: SimulatedSession) -> None: ...


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
        stages = self.scheduler.route(session)
        if stages is None:
            return False
        self.opened += 1
        self.live[session.number] = session
        self.engine.open(session, stages)
        return True

    def replay(self, session: SimulatedSession) -> bool:
        """Replay a lost session's prompt and answer so far over another route; False: no route."""
        self.engine.cancel(session)
        self.scheduler.ended(session)
        stages = self.scheduler.route(session)
        if stages is None:
            return False
        self.replays += 1
        session.replays += 1
        session.tokens_in_kv = 0
        done = session.output_tokens - session.left_tokens
        self.engine.open(session, stages, session.input_tokens + done)
        return True

    # Called by the engine

    def prompt_done(self, session: SimulatedSession, now_s: float) -> None:
        if session.replays == 0 and self.start_s <= now_s <= self.end_s:
            self.prompt_s.append(now_s - session.arrival_s)
            self.prompt_tokens += session.input_tokens
        self.scheduler.decode(session)
        self.after_prompt(now_s)

    def token_done(self, session: SimulatedSession, now_s: float, issued_s: float) -> None:
        if self.start_s <= now_s <= self.end_s:
            self.decode_s.append(now_s - issued_s)
            bucket = int(now_s / BUCKET_S)
            self.tokens_by_bucket[bucket] = self.tokens_by_bucket.get(bucket, 0) + 1
        if session.left_tokens:
            self.scheduler.decode(session)

    def session_done(self, session: SimulatedSession, now_s: float) -> None:
        self.sessions_done += 1
        del self.live[session.number]
        self.scheduler.ended(session)
        self.after_session(now_s)

    def after_prompt(self, now_s: float) -> None:
        """Called when a prompt has ended; a feeder may send another request."""

    def after_session(self, now_s: float) -> None:
        """Called when a session has ended; a feeder may send another request."""

    # Counts

    def sample(self) -> None:
        """Sample KV use and sessions now, and again every ``SAMPLE_S``."""
        self._kv_peaks.look(self.live.values(), self.engine.peers)
        self.live_samples.append(len(self.live))
        self.engine.call_at(self.engine.now_s + SAMPLE_S, self.sample)

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
                (bucket * BUCKET_S, count / BUCKET_S)
                for bucket, count in sorted(self.tokens_by_bucket.items())
            ),
            peers=peer_use(self.engine),
            links=link_use(self.engine),
        )


class Standing(Run):
    """An endless line of requests: each opens as soon as it finds a route with room."""

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
        self._feed()
        self.engine.call_at(self.engine.now_s + KNOCK_S, self._knock)

    def _feed(self) -> None:
        now_s = self.engine.now_s
        while len(self.live) < self.sessions_max and now_s <= self.end_s:
            if not self.open(self._next, now_s):
                return
            self._next = next(self._requests)

    def after_session(self, now_s: float) -> None:
        self._feed()


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
        self.lost: deque[SimulatedSession] = deque()
        self.to_come = len(requests)
        for request in requests:
            engine.call_at(request.arrival_s, partial(self._arrive, request))

    def _arrive(self, request: Request) -> None:
        self.to_come -= 1
        self.line.append(request)
        self.serve_line()

    def serve_line(self) -> None:
        """Open waiting sessions, lost ones first, until one finds no route."""
        while self.lost:
            if not self.replay(self.lost[0]):
                return
            self.lost.popleft()
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
