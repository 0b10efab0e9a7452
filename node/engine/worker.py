"""The thread that owns an engine: takes ready items, runs steps, hands results back.

Submitting is cheap and safe from the event loop's thread. A step's results come back in one call on
the loop. Other work on the engine, such as loading layers, runs between steps in the same thread.
"""

import asyncio
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from coordinator.policies.batching.scheduler import BatchLimits, Scheduler
from node.engine.work_item import WorkItem, WorkResult

logger = logging.getLogger(__name__)

STOPPED = "the engine's worker has stopped"

SWITCH_INTERVAL_S = 0.0005
"""How long a thread may hold the interpreter while another wants it: the event loop must answer
while a step prepares its next operation."""

T = TypeVar("T")


@dataclass(slots=True)
class WorkerTimes:
    """How the worker's time was spent since it started."""

    steps: int = 0
    tokens: int = 0
    """Rows that were run, without those that were drafted."""
    compute_s: float = 0.0
    waiting_s: float = 0.0
    """Sum over items of the time from submission to the start of the item's step."""


class Worker:
    """Runs batches with ``run_step`` in a thread of its own."""

    def __init__(
        self,
        run_step: Callable[[Sequence[WorkItem]], Sequence[WorkResult]],
        on_results: Callable[[Sequence[WorkResult]], None],
        limits: BatchLimits,
    ) -> None:
        self._run_step = run_step
        self._on_results = on_results
        self._loop = asyncio.get_running_loop()
        self._ready = threading.Condition()
        self._scheduler: Scheduler[WorkItem] = Scheduler(limits)
        self._arrived: list[WorkItem] = []
        """Items of which the engine has not heard; the event loop's alone."""
        self._gathers = False
        self._calls: list[tuple[Callable[[], Any], asyncio.Future[Any]]] = []
        self._stopping = False
        self.times = WorkerTimes()
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def submit(self, work: WorkItem) -> None:
        """Queue one item for the next step that takes it."""
        self._arrived.append(work)
        if not self._gathers:
            self._tell()

    @contextmanager
    def together(self) -> Iterator[None]:
        """Let the engine hear of all items that are submitted in this block at its end, so that one
        step can take them."""
        outer, self._gathers = self._gathers, True
        try:
            yield
        finally:
            self._gathers = outer
            if self._arrived and not outer:
                self._tell()

    def _tell(self) -> None:
        with self._ready:
            for work in self._arrived:
                self._scheduler.add(work)
            self._ready.notify()
        self._arrived.clear()

    @property
    def backlog_tokens(self) -> int:
        """Number of prefill rows that wait for a step."""
        with self._ready:
            return self._scheduler.backlog_tokens

    def drop(self, session: str) -> None:
        """Forget queued work of a session that ended."""
        self._arrived = [work for work in self._arrived if work.session != session]
        with self._ready:
            self._scheduler.drop(session)

    async def call(self, work: Callable[[], T]) -> T:
        """Run ``work`` between steps in the engine's thread and return its result.

        Raises RuntimeError if the worker stops before ``work`` has run.
        """
        done: asyncio.Future[T] = self._loop.create_future()
        with self._ready:
            if self._stopping:
                raise RuntimeError(STOPPED)
            self._calls.append((work, done))
            self._ready.notify()
        return await done

    def stop(self, limit_s: float = 120.0) -> None:
        """End the thread after its running step. One that has not ended after ``limit_s`` is left
        behind: a device that hangs must not keep this process from ending."""
        with self._ready:
            self._stopping = True
            self._ready.notify()
        self._thread.join(limit_s)

    def _on_loop(self, call: Callable[..., None], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(call, *arguments)
        except RuntimeError:
            logger.debug("the event loop ended before a result was handed over")

    def _run(self) -> None:
        while True:
            with self._ready:
                batch: list[WorkItem] = []
                while not (self._stopping or self._calls or batch):
                    batch = self._scheduler.next_batch(time.perf_counter())
                    if not batch:
                        self._ready.wait(self._scheduler.wait_s(time.perf_counter()))
                calls, self._calls = self._calls, []
                if self._stopping:
                    for _, done in calls:
                        self._on_loop(_fail, done, RuntimeError(STOPPED))
                    return
                now_s, started_s = self._loop.time(), time.perf_counter()
                self.times.waiting_s += sum(now_s - work.queued_s for work in batch)
            for call, done in calls:
                self._answer(call, done)
            if batch:
                results = self._results(batch)
                self.times.steps += 1
                self.times.tokens += sum(work.tokens - len(work.drafts) for work in batch)
                self.times.compute_s += time.perf_counter() - started_s
                self._on_loop(self._on_results, results)

    def _answer(self, call: Callable[[], T], done: "asyncio.Future[T]") -> None:
        try:
            result = call()
        except BaseException as error:  # noqa: BLE001  handed to the caller, whatever it is
            self._on_loop(_fail, done, error)
        else:
            self._on_loop(_finish, done, result)

    def _results(self, batch: Sequence[WorkItem]) -> Sequence[WorkResult]:
        """The step's results; if it raises, each of its items fails and the thread goes on."""
        try:
            return self._run_step(batch)
        except Exception as error:
            logger.exception("a step of %d items failed", len(batch))
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            told = f"the engine's step failed: {reason}"
            return [WorkResult(item=work, error=told) for work in batch]


def _finish(done: "asyncio.Future[T]", result: T) -> None:
    if not done.cancelled():
        done.set_result(result)


def _fail(done: "asyncio.Future[T]", error: BaseException) -> None:
    if not done.cancelled():
        done.set_exception(error)
