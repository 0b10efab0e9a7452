"""Link policies to compare the project's own with; no peer runs them."""

import asyncio
import math
from collections.abc import Callable
from typing import Any

from coordinator.links.scheduler import FRAME_BYTES_MIN, LinkScheduler, TrafficClass

OVERTAKING_MAX = 30
"""MoLink's N: decodes that may overtake a waiting prefill."""
DECODE_GAP_WEIGHT = 0.2
"""Of the newest gap between decodes in their moving average."""


class InOrder(LinkScheduler):
    """Whole messages in their order, as vLLM and Helix send."""

    def _choose(self, _now_us: int, urgent_only: bool) -> tuple[Any, float]:
        heads = [] if urgent_only else [queue[0] for queue in self._queues.values() if queue]
        return min(heads, key=lambda message: message.number, default=None), math.inf


class MoLink(LinkScheduler):
    """Algorithm 1 of MoLink (EMNLP Findings 2025, §3.2): decode first while fewer than N decodes
    overtook the waiting prefill; prefill in chunks that end when the next decode is due.

    MoLink predicts the next decode from profiles; here from the decodes before.
    """

    def __init__(
        self,
        now_us: Callable[[], int] = lambda: int(asyncio.get_running_loop().time() * 1e6),
    ) -> None:
        super().__init__()
        self._now_us = now_us
        self._overtook = 0
        self._decode_us: int | None = None
        self._decode_gap_us = 0.0
        self.decode_due_us: int | None = None

    def offer(self, traffic: TrafficClass, size_bytes: int) -> int:
        if traffic is TrafficClass.DECODE:
            now_us = self._now_us()
            if self._decode_us is not None:
                gap_us = now_us - self._decode_us
                self._decode_gap_us += DECODE_GAP_WEIGHT * (gap_us - self._decode_gap_us)
                self.decode_due_us = now_us + int(self._decode_gap_us)
            self._decode_us = now_us
        return super().offer(traffic, size_bytes)

    def _choose(self, now_us: int, urgent_only: bool) -> tuple[Any, float]:
        if urgent_only:
            return None, 0.0
        urgent = self._head(TrafficClass.CONTROL, TrafficClass.DECODE)
        slow = self._head(TrafficClass.PREFILL, TrafficClass.BULK)
        if slow is None:
            return urgent, math.inf
        if urgent is not None and self._overtook < OVERTAKING_MAX:
            self._overtook += urgent.traffic is TrafficClass.DECODE
            return urgent, math.inf
        self._overtook = 0
        bandwidth = self.delivery.bandwidth_bytes_per_s
        if self.decode_due_us is None or bandwidth <= 0:
            return slow, math.inf
        room_us = max(0, self.decode_due_us - now_us)
        return slow, max(room_us * bandwidth / 1e6, FRAME_BYTES_MIN)


SCHEDULERS: dict[str, Callable[[], LinkScheduler]] = {
    "fifo": InOrder,
    "molink": MoLink,
    "anabranch": LinkScheduler,
}
