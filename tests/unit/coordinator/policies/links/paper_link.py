"""A link on paper: serialisation at a rate that may change, a delay, and an attentive reader."""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

from hypothesis import strategies as st

from coordinator.policies.links.scheduler import LinkScheduler, Slice, TrafficClass

OFFERS = st.lists(
    st.tuples(
        st.sampled_from(list(TrafficClass)),
        st.one_of(st.integers(1, 200), st.integers(1, 300_000)),
        st.integers(0, 50_000),
    ),
    min_size=1,
    max_size=60,
)
"""Class, bytes, and microseconds since the one before."""


@dataclass(slots=True)
class PaperLink:
    """Drives a scheduler event by event; times in microseconds."""

    scheduler: LinkScheduler
    rate: Callable[[int], float]
    """Bytes/s at a time."""
    delay_us: int
    wakes_us: Callable[[int], int] = lambda arrived_us: arrived_us
    """When a reader that is busy with other things reads what arrived at a time."""
    now_us: int = 0
    free_us: int = 0
    events: list[tuple[int, int, Callable[[], None]]] = field(default_factory=list)
    left: list[tuple[int, Slice]] = field(default_factory=list)
    arrived: dict[int, int] = field(default_factory=dict)
    """When the last byte of a message was read."""
    offered: dict[int, int] = field(default_factory=dict)
    ticket: int = 0
    read_bytes: int = 0
    slow_bytes: int = 0

    def at(self, time_us: int, action: Callable[[], None]) -> None:
        self.ticket += 1
        heapq.heappush(self.events, (max(time_us, self.now_us), self.ticket, action))

    def offer(self, traffic: TrafficClass, size: int) -> int:
        number = self.scheduler.offer(traffic, size)
        self.offered[number] = self.now_us
        self.pump()
        return number

    def pump(self) -> None:
        while (piece := self.scheduler.next_slice(self.now_us)) is not None:
            self.left.append((self.now_us, piece))
            start = max(self.now_us, self.free_us)
            self.free_us = start + int(piece.size_bytes / self.rate(start) * 1e6) + 1
            read_us = self.wakes_us(self.free_us + self.delay_us)
            self.at(read_us, lambda piece=piece: self.read(piece))

    def read(self, piece: Slice) -> None:
        self.read_bytes += piece.size_bytes
        self.slow_bytes += piece.size_bytes if piece.traffic >= TrafficClass.PREFILL else 0
        total, slow = self.read_bytes, self.slow_bytes
        if piece.last:
            self.arrived[piece.number] = self.now_us
        self.at(self.now_us + self.delay_us, lambda: self.acknowledge(total, slow))

    def acknowledge(self, total: int, slow: int) -> None:
        self.scheduler.acknowledged(total, slow, self.now_us)
        self.pump()

    def run(self, until_us: int | None = None) -> None:
        while self.events and (until_us is None or self.events[0][0] <= until_us):
            self.now_us, _, action = heapq.heappop(self.events)
            action()
        if until_us is not None:
            self.now_us = until_us


def all_arrive(link: PaperLink, offers: list[tuple[TrafficClass, int, int]]) -> None:
    """Whatever the scheduler: messages arrive whole and those of a class in their order."""
    offered: dict[int, tuple[TrafficClass, int]] = {}
    at_us = 0
    for traffic, size, pause_us in offers:
        at_us += pause_us
        link.run(at_us)
        offered[link.offer(traffic, size)] = (traffic, size)
    link.run()
    got: dict[int, int] = dict.fromkeys(offered, 0)
    for _, piece in link.left:
        assert piece.offset == got[piece.number], "a gap or a repetition"
        assert piece.traffic is offered[piece.number][0]
        got[piece.number] += piece.size_bytes
        assert piece.last == (got[piece.number] == offered[piece.number][1])
    assert got == {number: size for number, (_, size) in offered.items()}
    assert set(link.arrived) == set(offered)
    for traffic in TrafficClass:
        ends = [piece.number for _, piece in link.left if piece.last and piece.traffic is traffic]
        assert ends == sorted(ends)
    scheduler = link.scheduler
    assert scheduler.queued_bytes == 0
    assert scheduler.slow_in_flight_bytes == 0
    assert scheduler.delivery.in_flight_bytes == 0
