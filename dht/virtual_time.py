"""An event loop whose clock jumps to the next timer, for tests and the simulator.

Hours of a swarm's life pass in seconds, and the same seed gives the same run. The idea is trio's
``MockClock`` with ``autojump_threshold=0``.
"""

import asyncio
import heapq
import math
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class VirtualClockLoop(asyncio.SelectorEventLoop):
    """A loop without waiting: when nothing is ready, its time becomes that of the next timer.

    When nothing is ready and no timer is set, every task waits for another: a RuntimeError that
    names them ends the run. Work in threads (``run_in_executor``) is waited for in real time.
    """

    _ready: Any
    _scheduled: list[Any]
    _timer_cancelled_count: int

    def __init__(self, *, limit_s: float = math.inf) -> None:
        super().__init__()
        self._virtual_s = 0.0
        self._limit_s = limit_s
        self._in_threads = 0
        # Timers due within it run together; must exceed what a float resolves after long runs.
        self._clock_resolution = 1e-6

    def time(self) -> float:
        """Seconds since the loop was made."""
        return self._virtual_s

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., T], *args: Any
    ) -> "asyncio.Future[T]":
        future = super().run_in_executor(executor, func, *args)
        self._in_threads += 1
        future.add_done_callback(self._thread_done)
        return future

    def _thread_done(self, _future: "asyncio.Future[Any]") -> None:
        self._in_threads -= 1

    async def shutdown_default_executor(self, *args: Any) -> None:
        """Waits for the executor's threads, which is work in threads too."""
        self._in_threads += 1
        try:
            await super().shutdown_default_executor(*args)
        finally:
            self._in_threads -= 1

    def _run_once(self) -> None:
        if not self._ready and not self._in_threads:
            while self._scheduled and self._scheduled[0]._cancelled:
                handle = heapq.heappop(self._scheduled)
                handle._scheduled = False
                self._timer_cancelled_count -= 1
            if not self._scheduled:
                raise RuntimeError(f"deadlock: nothing can wake {_describe(self)}")
            next_s = self._scheduled[0]._when
            if next_s > self._limit_s:
                limit_s, self._limit_s = self._limit_s, math.inf  # the clean-up may take longer
                raise TimeoutError(f"not done after {limit_s} virtual s: {_describe(self)}")
            self._virtual_s = max(self._virtual_s, next_s)
        super()._run_once()  # type: ignore[misc]


def run_virtual(coro: Coroutine[Any, Any, T], *, limit_s: float) -> T:
    """Run ``coro`` on a virtual clock.

    Raises TimeoutError when ``limit_s`` virtual seconds did not suffice and RuntimeError, naming
    the tasks, when all of them wait for each other.
    """

    with asyncio.Runner(loop_factory=lambda: VirtualClockLoop(limit_s=limit_s)) as runner:
        return runner.run(coro)


def _describe(loop: asyncio.AbstractEventLoop) -> str:
    waiting = []
    for task in asyncio.all_tasks(loop):
        frames = task.get_stack(limit=1)
        where = f"{frames[-1].f_code.co_qualname}:{frames[-1].f_lineno}" if frames else "?"
        waiting.append(f"{task.get_name()} at {where}")
    return "; ".join(sorted(waiting)) or "the loop, which has no tasks"
