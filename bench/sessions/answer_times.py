"""When the tokens of an answer came, for benchmarks of what interrupts it."""

import asyncio
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from client.swarm.one_answer import Generation


@dataclass(slots=True)
class Stream:
    """One answer and when its tokens came."""

    running: Generation
    clock: Callable[[], float] = time.perf_counter
    at_s: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    _came: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def read(self) -> None:
        """Take all of it."""
        async for piece in self.running:
            self.at_s += [self.clock()] * len(piece.token_ids)
            self.token_ids += piece.token_ids
            async with self._came:
                self._came.notify_all()

    async def reached(self, tokens: int) -> None:
        """Wait until so many tokens are here."""
        async with self._came:
            await self._came.wait_for(lambda: len(self.at_s) >= tokens)

    def gaps_s(self, from_s: float, until_s: float) -> list[float]:
        """Times between neighbouring tokens whose later one came in between."""
        pairs = zip(self.at_s, self.at_s[1:], strict=False)
        return [b - a for a, b in pairs if from_s <= b and a <= until_s]

    def per_token_s(self, from_s: float, until_s: float) -> float:
        """Mean time per token in a stretch; NaN-free: 0 where no token came."""
        gaps = self.gaps_s(from_s, until_s)
        return statistics.fmean(gaps) if gaps else 0.0
