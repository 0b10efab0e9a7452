"""Simulates links with the project's own link scheduler, slice by slice, in virtual time.

The scheduler is :class:`coordinator.policies.links.scheduler.LinkScheduler` as peers run it,
straight above the wire: the next slice is taken when the one before has left. The receiver reads at
once, so credits return one round trip after a slice has left.
"""

from coordinator.policies.links.scheduler import LinkScheduler, Slice, TrafficClass
from coordinator.simulator.core.parts import SimulatedLink, SimulatedPiece, SimulatedSession
from coordinator.simulator.core.swarm import LiveSwarm


class ScheduledWire:
    """The sender of one directed link, with a real link scheduler."""

    def __init__(self, swarm: LiveSwarm) -> None:
        self._swarm = swarm
        self.stalled: list[SimulatedSession] = []
        self.scheduler = LinkScheduler()
        self._waiting: dict[int, tuple[SimulatedLink, list[SimulatedPiece], float, float]] = {}
        self._busy = False
        self._sent_bytes = 0
        self._slow_bytes = 0

    @property
    def queued_bytes(self) -> float:
        return self.scheduler.queued_bytes

    def offer(
        self,
        link: SimulatedLink,
        frame: list[SimulatedPiece],
        size_bytes: float,
        traffic: TrafficClass,
    ) -> None:
        """Queue a frame; it leaves when its turn comes."""
        number = self.scheduler.offer(traffic, max(1, round(size_bytes)))
        self._waiting[number] = link, frame, size_bytes, self._swarm.now_s
        if not self._busy:
            self._pump()

    def _pump(self) -> None:
        swarm = self._swarm
        cut = self.scheduler.next_slice(int(swarm.now_s * 1e6))
        if cut is None:
            self._busy = False
            return
        self._busy = True
        link, _, _, offered_s = self._waiting[cut.number]
        if cut.offset == 0:
            link.waited_s += swarm.now_s - offered_s
        swarm.at(swarm.now_s + cut.size_bytes / link.bytes_per_s, self._left, cut)

    def _left(self, cut: Slice) -> None:
        swarm = self._swarm
        link, frame, size_bytes, _ = self._waiting[cut.number]
        self._sent_bytes += cut.size_bytes
        if cut.traffic >= TrafficClass.PREFILL:
            self._slow_bytes += cut.size_bytes
        if cut.last:
            del self._waiting[cut.number]
            swarm.leave(link, swarm.now_s, frame, size_bytes, cut.traffic)
        read_s = swarm.now_s + 2 * link.latency_s
        swarm.at(read_s, self._read, (self._sent_bytes, self._slow_bytes))
        self._pump()
        if self.stalled:
            swarm.go_on(self)

    def _read(self, counted: tuple[int, int]) -> None:
        self.scheduler.acknowledged(*counted, int(self._swarm.now_s * 1e6))
        if not self._busy:
            self._pump()
