"""Simulates links with the project's own link scheduler, frame by frame, in virtual time.

The scheduler is :class:`coordinator.links.scheduler.LinkScheduler` as peers run it, straight above
the wire: the next slice is taken when the one before has left. The receiver reads at once, so
credits return one round trip after a slice has left.
"""

from functools import partial

from coordinator.links.scheduler import LinkScheduler, Slice, TrafficClass
from coordinator.simulator.core.event_loop import SwarmSimulation
from coordinator.simulator.core.parts import (
    SimulatedChunk,
    SimulatedHop,
    SimulatedLink,
)


class ScheduledWire:
    """The sender of one directed link, with a real link scheduler."""

    def __init__(self, engine: SwarmSimulation, link: SimulatedLink) -> None:
        self._engine = engine
        self._link = link
        self.scheduler = LinkScheduler()
        self._waiting: dict[int, tuple[SimulatedChunk, SimulatedHop, float]] = {}
        self._busy = False
        self._sent_bytes = 0
        self._slow_bytes = 0

    def offer(self, piece: SimulatedChunk, hop: SimulatedHop) -> None:
        """Queue a piece; it leaves when its turn comes."""
        traffic = TrafficClass.PREFILL if piece.prefill else TrafficClass.DECODE
        size_bytes = max(1, round(piece.tokens * self._link.token_bytes))
        number = self.scheduler.offer(traffic, size_bytes)
        self._waiting[number] = piece, hop, self._engine.now_s
        self._link.pieces += 1
        if not self._busy:
            self._pump()

    def _pump(self) -> None:
        engine, link = self._engine, self._link
        cut = self.scheduler.next_slice(int(engine.now_s * 1e6))
        if cut is None:
            self._busy = False
            return
        self._busy = True
        took_s = cut.size_bytes / link.bytes_per_s
        link.busy_s += took_s
        if cut.offset == 0:
            piece, _, offered_s = self._waiting[cut.number]
            link.waited_s += engine.now_s - offered_s
            piece.sent_s = engine.now_s
        engine.call_at(engine.now_s + took_s, partial(self._left, cut))

    def _left(self, cut: Slice) -> None:
        engine, link = self._engine, self._link
        self._sent_bytes += cut.size_bytes
        if cut.traffic >= TrafficClass.PREFILL:
            self._slow_bytes += cut.size_bytes
        if cut.last:
            piece, hop, _ = self._waiting.pop(cut.number)
            engine.arrive(piece, hop, engine.now_s + link.latency_s)
        read_s = engine.now_s + 2 * link.latency_s
        engine.call_at(read_s, partial(self._read, self._sent_bytes, self._slow_bytes))
        self._pump()

    def _read(self, sent_bytes: int, slow_bytes: int) -> None:
        self.scheduler.acknowledged(sent_bytes, slow_bytes, int(self._engine.now_s * 1e6))
        if not self._busy:
            self._pump()
