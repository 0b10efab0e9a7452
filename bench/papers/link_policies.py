"""Link policies to compare the project's own with; no peer runs them."""

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from coordinator.policies.links.scheduler import LinkConfig, LinkScheduler, TrafficClass

OVERTAKING_MAX = 30
"""MoLink's N: decodes that may overtake a waiting prefill."""


class InOrder(LinkScheduler):
    """Whole messages in their order, as vLLM and Helix send."""

    def _choose(self, _now_us: int, urgent_only: bool) -> tuple[Any, float]:
        heads = [] if urgent_only else [queue[0] for queue in self._queues.values() if queue]
        return min(heads, key=lambda message: message.number, default=None), math.inf


@dataclass(slots=True, kw_only=True)
class DecodeProfile:
    """What MoLink's sender knows of decodes from profiles (§3.2). Times in microseconds."""

    decode_us: Callable[[int], float]
    """T_d: a stage's time by the number of decodes."""
    stages: int
    hop_us: float
    """Delay of one link."""
    row_us: float
    """Transfer time of one decode's activations over one link."""
    running: Callable[[], tuple[float, int] | None] = field(default=lambda: None)
    """When the step that runs here began, and its decodes; None: none with decodes runs."""

    def due_us(self, now_us: float, left: tuple[float, int] | None) -> float | None:
        """Time until the next decode wants the link: the paper's T_a.

        ``left``: when the last decodes left, and how many. They come back after every stage ran
        them (T_o) and every link carried them (T_m). None: no decodes are known of.
        """
        if (run := self.running()) is not None:  # the chunk starts with a decode's step, or in it
            started_us, count = run
            return max(0.0, started_us + self.decode_us(count) - now_us)
        if left is None:
            return None
        left_us, count = left
        others_us = self.stages * self.decode_us(count)
        moved_us = self.stages * self.hop_us + (self.stages - 1) * count * self.row_us
        return max(0.0, left_us + others_us + moved_us - now_us)


class MoLink(LinkScheduler):
    """Algorithm 1 of MoLink (EMNLP Findings 2025, §3.2), as printed.

    Decodes go first while fewer than N of them overtook the waiting prefill; then all that is left
    of the prefill goes. While no decode waits, prefill goes in chunks of T_a times bandwidth, which
    end when the next decode is due. A chunk that was begun goes on before decodes. What is on its
    way is bounded by acknowledgements, as the project's own is: behind a full buffer below, no
    chunk ends in time for a decode.
    """

    def __init__(
        self,
        profile: DecodeProfile | None = None,
        now_us: Callable[[], int] = lambda: int(asyncio.get_running_loop().time() * 1e6),
        row_bytes: int = 1,
    ) -> None:
        super().__init__()
        self._now_us = now_us
        self._profile = profile
        self._row_bytes = row_bytes
        self._overtook = 0
        self._chunk_bytes = 0.0
        """What is left to send of the chunk that was begun."""
        self._left: tuple[float, int] | None = None

    def offer(self, traffic: TrafficClass, size_bytes: int) -> int:
        if traffic is TrafficClass.DECODE:
            self._left = self._now_us(), max(1, size_bytes // self._row_bytes)
        return super().offer(traffic, size_bytes)

    def _choose(self, now_us: int, urgent_only: bool) -> tuple[Any, float]:
        if urgent_only:
            return None, 0.0
        urgent = self._head(TrafficClass.CONTROL, TrafficClass.DECODE)
        slow = self._head(TrafficClass.PREFILL, TrafficClass.BULK)
        if slow is None:
            return urgent, math.inf
        if self._chunk_bytes <= 0:
            if urgent is not None and self._overtook < OVERTAKING_MAX:
                self._overtook += urgent.traffic is TrafficClass.DECODE
                return urgent, math.inf
            self._chunk_bytes = self._next_chunk(slow.rest_bytes, now_us)
        frame = min(self.frame_bytes, slow.rest_bytes, math.ceil(self._chunk_bytes))
        if self.slow_in_flight_bytes + frame > self.window_bytes:
            return None, 0.0
        self._chunk_bytes = self._chunk_bytes - frame if frame < slow.rest_bytes else 0.0
        return slow, frame

    def _next_chunk(self, rest_bytes: int, now_us: int) -> float:
        flush, self._overtook = self._overtook >= OVERTAKING_MAX, 0
        due_us = None if self._profile is None else self._profile.due_us(now_us, self._left)
        bandwidth = self.delivery.bandwidth_bytes_per_s
        if flush or due_us is None or bandwidth <= 0:
            return rest_bytes
        return max(due_us * bandwidth / 1e6, LinkConfig().frame_bytes_min)
