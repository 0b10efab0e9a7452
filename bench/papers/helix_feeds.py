"""How requests come in Helix's simulator under full load."""

from collections.abc import Iterator

from bench.papers.helix_scheduler import HelixScheduler
from coordinator.simulator.clients import RequestScheduler
from coordinator.simulator.core.trace import Request
from coordinator.simulator.runs.runs import Run, Simulation

FEED_DELAY_S = 0.1


class ClosedLoop(Run):
    """A fixed number of sessions, each replaced at its end (Helix's load for Swarm and random)."""

    def __init__(
        self,
        engine: Simulation,
        scheduler: RequestScheduler,
        requests: Iterator[Request],
        *,
        sessions: int,
        start_s: float,
        end_s: float,
    ) -> None:
        super().__init__(engine, scheduler, start_s=start_s, end_s=end_s)
        self._requests = requests
        for number in range(sessions):
            self._feed_at(number * FEED_DELAY_S)

    def _feed_at(self, at_s: float) -> None:
        request = next(self._requests)
        self.engine.call_at(at_s, lambda: self._offer(request))

    def _offer(self, request: Request) -> None:
        if not self.open(request, self.engine.now_s):
            self.rejected += 1

    def _has_room(self) -> bool:
        return True

    def after_session(self, now_s: float) -> None:
        if now_s <= self.end_s and self._has_room():
            self._feed_at(now_s + FEED_DELAY_S)


class HelixFeed(ClosedLoop):
    """Helix's offline load: the end of a prompt or session feeds a request while there is room."""

    def __init__(
        self,
        engine: Simulation,
        scheduler: HelixScheduler,
        requests: Iterator[Request],
        *,
        sessions: int,
        start_s: float,
        end_s: float,
    ) -> None:
        super().__init__(
            engine, scheduler, requests, sessions=sessions, start_s=start_s, end_s=end_s
        )
        self._helix = scheduler

    def _has_room(self) -> bool:
        return self._helix.fullest_layer() <= self._helix.rules.feed_below

    def after_prompt(self, now_s: float) -> None:
        self.after_session(now_s)
