"""Who answers next: a bounded number of turns, shared among those who ask."""

import asyncio
import math
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnsConfig:
    own_share: float = 0.75
    """The most of all turns that one of those who ask may have at a time, so that somebody else
    who comes waits for no answer to end."""


class Turns:
    """``count`` turns. Whoever has the fewest gets the next one; of several, the one who waits for
    it since longest ago."""

    def __init__(self, count: int, config: TurnsConfig = TurnsConfig()) -> None:
        self._free = count
        self._own_max = max(1, math.ceil(count * config.own_share))
        self._taken: Counter[str] = Counter()
        self._waiting: OrderedDict[str, OrderedDict[asyncio.Future[None], None]] = OrderedDict()
        """Turns that are waited for, the first to come first, by who waits. Any of them is left
        without a search: who hangs up may have thousands."""

    def at_most(self, who: str) -> bool:
        """Whether ``who`` has as many turns as anyone may have at a time."""
        return self._taken[who] >= self._own_max

    async def take(self, who: str, wait_s: float | None, may_leave: Callable[[], bool]) -> bool:
        """Take a turn; False where none came within ``wait_s`` and ``may_leave`` says so then.
        None: one comes, however late."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(who, OrderedDict())[turn] = None
        self._grant()
        try:
            done, _ = await asyncio.wait({turn}, timeout=wait_s)
            if not done and may_leave():
                self._leave(who, turn)
                return False
            await turn
        except BaseException:
            self._leave(who, turn)
            raise
        return True

    def give_back(self, who: str) -> None:
        """End a turn."""
        self._taken[who] -= 1
        if not self._taken[who]:
            del self._taken[who]
        self._free += 1
        self._grant()

    def _leave(self, who: str, turn: "asyncio.Future[None]") -> None:
        if turn.done() and not turn.cancelled():
            self.give_back(who)
            return
        turn.cancel()
        waiting = self._waiting.get(who, OrderedDict())
        waiting.pop(turn, None)
        if not waiting:
            self._waiting.pop(who, None)

    def _grant(self) -> None:
        while self._free:
            able = [who for who in self._waiting if not self.at_most(who)]
            if not able:
                return
            who = min(able, key=lambda each: self._taken[each])  # of equals, the first to wait
            waiting = self._waiting[who]
            turn, _ = waiting.popitem(last=False)
            self._waiting.move_to_end(who)
            if not waiting:
                del self._waiting[who]
            if not turn.done():
                self._taken[who] += 1
                self._free -= 1
                turn.set_result(None)
