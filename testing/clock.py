"""An event loop whose clock jumps to the next timer, for tests and the simulator.

Hours of a swarm's life pass in seconds, and the same seed gives the same run: it does not depend on
the machine's load, on memory addresses or on the operating system's random numbers. The idea is
that of trio's ``MockClock`` with ``autojump_threshold=0``.
"""

import asyncio
import heapq
import math
import os
import random
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")


class _NumberedTask(asyncio.Task[Any]):
    """A task whose hash is its number, so that its place in a set follows from the creation order.

    asyncio keeps tasks in sets, and cancels and wakes them in the order of those sets.
    """

    def __init__(self, coro: Coroutine[Any, Any, Any], *, number: int, **options: Any) -> None:
        self._number = number
        super().__init__(coro, **options)

    def __hash__(self) -> int:
        return self._number


class VirtualClockLoop(asyncio.SelectorEventLoop):
    """A loop without waiting: when nothing is ready, its time becomes that of the next timer.

    When nothing is ready and no timer is set, every task waits for another: a RuntimeError that
    names them ends the run. Work for threads (``run_in_executor``) is run at once in the loop's own
    thread and takes no virtual time.
    """

    _ready: Any
    _scheduled: list[Any]
    _timer_cancelled_count: int

    def __init__(self, *, limit_s: float = math.inf) -> None:
        super().__init__()
        self._virtual_s = 0.0
        self._limit_s = limit_s
        self._tasks_made = 0
        self.set_task_factory(self._make_task)
        # Timers due within this time run together; it must exceed a float's resolution after long
        # runs.
        self._clock_resolution = 1e-6

    def time(self) -> float:
        """Seconds since the loop was made."""
        return self._virtual_s

    def _make_task(
        self, loop: asyncio.AbstractEventLoop, coro: Any, **options: Any
    ) -> _NumberedTask:
        self._tasks_made += 1
        return _NumberedTask(coro, number=self._tasks_made, loop=loop, **options)

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., T], *args: Any
    ) -> "asyncio.Future[T]":
        future: asyncio.Future[T] = self.create_future()
        try:
            self.call_soon(_settle, future.set_result, future, func(*args))
        except Exception as error:  # noqa: BLE001  (whoever awaits the work gets it)
            self.call_soon(_settle, future.set_exception, future, error)
        return future

    def _run_once(self) -> None:
        if not self._ready:
            while self._scheduled and self._scheduled[0]._cancelled:
                handle = heapq.heappop(self._scheduled)
                handle._scheduled = False
                self._timer_cancelled_count -= 1
            if not self._scheduled:
                raise RuntimeError(f"deadlock: nothing can wake {_describe(self)}")
            next_s = self._scheduled[0]._when
            if next_s > self._limit_s:
                limit_s, self._limit_s = self._limit_s, math.inf  # no limit for the clean-up
                raise TimeoutError(f"not done after {limit_s} virtual s: {_describe(self)}")
            self._virtual_s = max(self._virtual_s, next_s)
        super()._run_once()  # type: ignore[misc]


def run_virtual(coro: Coroutine[Any, Any, T], *, limit_s: float) -> T:
    """Run ``coro`` on a virtual clock.

    Raises TimeoutError after ``limit_s`` virtual seconds, and RuntimeError, naming the tasks, when
    all of them wait for each other.
    """

    with (
        _drawn_by_number(),
        asyncio.Runner(loop_factory=lambda: VirtualClockLoop(limit_s=limit_s)) as runner,
    ):
        return runner.run(_alone(coro))


async def _alone(coro: Coroutine[Any, Any, T]) -> T:
    """Run ``coro``, then cancel the tasks that it left, in the order of their creation.

    asyncio itself would cancel them in the order of a set that all loops of the process fill.
    """
    try:
        return await coro
    finally:
        left = asyncio.all_tasks() - {asyncio.current_task()}
        ordered = sorted(left, key=hash)  # a task's number
        for task in ordered:
            task.cancel()
        await asyncio.gather(*ordered, return_exceptions=True)


@contextmanager
def _drawn_by_number() -> Iterator[None]:
    """Replace the operating system's random numbers by seeded ones, for keys and session names."""
    drawn, system, state = random.Random(0), os.urandom, random.getstate()
    os.urandom = random._urandom = drawn.randbytes  # type: ignore[attr-defined]
    random.seed(0)
    try:
        yield
    finally:
        os.urandom = random._urandom = system  # type: ignore[attr-defined]
        random.setstate(state)


def _settle(settle: Callable[[Any], None], future: "asyncio.Future[Any]", outcome: object) -> None:
    if not future.done():
        settle(outcome)


def _describe(loop: asyncio.AbstractEventLoop) -> str:
    waiting = []
    for task in asyncio.all_tasks(loop):
        frames = task.get_stack(limit=1)
        where = f"{frames[-1].f_code.co_qualname}:{frames[-1].f_lineno}" if frames else "?"
        waiting.append(f"{task.get_name()} at {where}")
    return "; ".join(sorted(waiting)) or "the loop, which has no tasks"
