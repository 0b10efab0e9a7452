"""Simulates links in closed form: the project's link scheduler without its slices, and in order.

Under the link scheduler a decode waits for the slice being sent and for earlier decodes; a prompt
gets the time that decodes leave, and a share of its own where they leave none. Tests hold it
against the scheduler itself, slice by slice (:mod:`coordinator.simulator.links.scheduled_wire`).
"""

from collections import deque

from coordinator.policies.links.scheduler import (
    LinkConfig,
    TrafficClass,
)
from coordinator.simulator.core.parts import SimulatedLink, SimulatedPiece, SimulatedSession
from coordinator.simulator.core.swarm import LiveSwarm

PREFILL = TrafficClass.PREFILL


LINK = LinkConfig()


class FramedWire:
    """The sender of a directed link in closed form, or of links that share an uplink."""

    __slots__ = (
        "_decodes_until_s",
        "_prompt_until_s",
        "_prompts",
        "_swarm",
        "queued_bytes",
        "stalled",
    )

    def __init__(self, swarm: LiveSwarm) -> None:
        self._swarm = swarm
        self.stalled: list[SimulatedSession] = []
        self._decodes_until_s = 0.0
        self._prompts: deque[tuple[SimulatedLink, list[SimulatedPiece], float, float]] = deque()
        self._prompt_until_s = 0.0
        self.queued_bytes = 0.0

    def offer(
        self,
        link: SimulatedLink,
        frame: list[SimulatedPiece],
        size_bytes: float,
        traffic: TrafficClass,
    ) -> None:
        """Queue a frame. A decode's arrival is known at once, a prompt's when it has left."""
        swarm = self._swarm
        now_s = swarm.now_s
        prompts = self._prompts
        if traffic >= PREFILL:
            self.queued_bytes += size_bytes
            prompts.append((link, frame, size_bytes, now_s))
            if len(prompts) == 1:
                self._begin()
            return
        took_s = size_bytes / link.bytes_per_s
        start_s = self._decodes_until_s
        if start_s > now_s:
            end_s = start_s + took_s
            if prompts:  # decodes queue up: the prompt sends its share between them
                self._decodes_until_s = start_s + took_s / (1 - LINK.prefill_share)
                self._prompt_until_s += took_s
            else:
                self._decodes_until_s = end_s
        elif prompts:
            start_s = now_s + (self._prompt_until_s - now_s) % _slice_s(prompts[0][0].bytes_per_s)
            start_s += (
                took_s * LINK.prefill_share / (1 - LINK.prefill_share)
            )  # the prompt's share of bytes, on average
            self._decodes_until_s = end_s = start_s + took_s
            self._prompt_until_s += took_s
        else:
            start_s = now_s
            self._decodes_until_s = end_s = now_s + took_s
        link.waited_s += start_s - now_s
        swarm.leave(link, end_s, frame, size_bytes, traffic)

    def _begin(self) -> None:
        link, _, size_bytes, offered_s = self._prompts[0]
        start_s = max(self._swarm.now_s, self._decodes_until_s)
        link.waited_s += start_s - offered_s
        self._prompt_until_s = start_s + size_bytes / link.bytes_per_s
        self._swarm.at(self._prompt_until_s, self._end, None)

    def _end(self, _: None) -> None:
        swarm = self._swarm
        if self._prompt_until_s > swarm.now_s:  # decodes went first meanwhile
            swarm.at(self._prompt_until_s, self._end, None)
            return
        link, frame, size_bytes, _offered_s = self._prompts.popleft()
        self.queued_bytes -= size_bytes
        swarm.leave(link, swarm.now_s, frame, size_bytes, PREFILL)
        if self._prompts:
            self._begin()
        if self.stalled:
            swarm.go_on(self)


def _slice_s(bytes_per_s: float) -> float:
    """Time of a slice of prefill on a link, in seconds."""
    wanted = bytes_per_s * LINK.frame_us / 1e6
    return min(max(wanted, LINK.frame_bytes_min), LINK.frame_bytes_max) / bytes_per_s


class InOrderWire:
    """The sender of a directed link that sends whole frames, first come, first served."""

    __slots__ = ("_free_s", "_swarm", "queued_bytes", "stalled")

    def __init__(self, swarm: LiveSwarm) -> None:
        self._swarm = swarm
        self.stalled: list[SimulatedSession] = []
        self._free_s = 0.0
        self.queued_bytes = 0.0

    def offer(
        self,
        link: SimulatedLink,
        frame: list[SimulatedPiece],
        size_bytes: float,
        traffic: TrafficClass,
    ) -> None:
        """Queue a frame behind all others."""
        swarm = self._swarm
        start_s = max(swarm.now_s, self._free_s)
        link.waited_s += start_s - swarm.now_s
        self._free_s = start_s + size_bytes / link.bytes_per_s
        self.queued_bytes += size_bytes
        swarm.at(self._free_s, self._left, (link, frame, size_bytes, traffic))

    def _left(self, what: tuple[SimulatedLink, list[SimulatedPiece], float, TrafficClass]) -> None:
        link, frame, size_bytes, traffic = what
        swarm = self._swarm
        self.queued_bytes -= size_bytes
        swarm.leave(link, swarm.now_s, frame, size_bytes, traffic)
        if self.stalled:
            swarm.go_on(self)
