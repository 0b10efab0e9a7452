"""Runs the long-lived parts of a process, and sets up again what fails.

A part is an endless coroutine function. Its work on things outside of this process (records,
streams, files) ends with each failure; the objects that it belongs to stay, so a part that begins
again must find in them all that it needs.

A loop that stands still runs no part, and none of its time limits can fire: :class:`Watchdog` sees
that from a thread of its own.
"""

import asyncio
import logging
import os
import sys
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from dht.errors import AnabranchError, MachineError, UserError

if TYPE_CHECKING:
    from prometheus_client.core import CounterMetricFamily

RESTART_S = 5.0
"""Delay before a failed part begins again."""
FAILURES_MAX, WITHIN_S = 3, 60.0
"""Number of unexpected errors of one part within this time that end the process."""

SERVICE_VARIABLE = "ANABRANCH_SERVICE"
"""Set by what starts a command again when it ends: the systemd unit and the images."""

PartFunction = Callable[..., Coroutine[Any, Any, None]]
_log = logging.getLogger(__name__)


async def end_all(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel tasks and wait until all have ended, however they end."""
    ending = list(tasks)
    for task in ending:
        task.cancel()
    await asyncio.gather(*ending, return_exceptions=True)


async def first_of(*works: Coroutine[Any, Any, object], limit_s: float | None = None) -> None:
    """Run ``works`` until one of them is done, for ``limit_s`` at most, and end the others."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        await asyncio.wait(tasks, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await end_all(tasks)


def loop_s() -> float:
    """The running event loop's clock, which nobody sets; it stands still while a machine sleeps."""
    return asyncio.get_running_loop().time()


def slept_s() -> float:
    """Seconds for which this machine has slept since it was started; 0.0 where its system does not
    say so, or the clock of event loops goes on meanwhile."""
    if sys.platform == "linux":
        clocks = time.CLOCK_BOOTTIME, time.CLOCK_MONOTONIC
    elif sys.platform == "darwin":
        clocks = time.CLOCK_MONOTONIC_RAW, time.CLOCK_UPTIME_RAW
    else:
        return 0.0
    counted_s, awake_s = map(time.clock_gettime, clocks)
    return counted_s - awake_s


def seen(task: asyncio.Future[Any]) -> None:
    """A callback of a task that may fail when nobody waits for it any more: that is no fault."""
    if not task.cancelled():
        task.exception()


class Supervisor:
    """Keeps parts of one process running; ``failures`` counts their unexpected errors by part.

    Errors of others (the network, a peer, the swarm) are logged in one line and not counted; a
    :class:`UserError` or :class:`MachineError` ends the process at once. Any other error is a fault
    of ours: it is logged with its traceback and counted, and the ``FAILURES_MAX``-th of one part
    within ``WITHIN_S`` becomes a MachineError.
    """

    def __init__(self, on_error: Callable[[str, BaseException], None] | None = None) -> None:
        """``on_error`` is called with the part's name and each error that a part begins again
        after."""
        self.failures: Counter[str] = Counter()
        self._on_error = on_error or (lambda part, error: None)

    @asynccontextmanager
    async def beside(self, *works: PartFunction, ends_process: bool = True) -> AsyncIterator[None]:
        """Keep ``works`` running during the block, which ends with the error of one that cannot
        be kept running; ``ends_process`` as in :meth:`keep`."""
        async with beside(*(partial(self.keep, work, ends_process=ends_process) for work in works)):
            yield

    async def run(self, *works: PartFunction, ends_process: bool = True) -> None:
        """Keep ``works`` running until cancelled; raises as :meth:`keep`."""
        async with self.beside(*works, ends_process=ends_process):
            await asyncio.Event().wait()

    async def keep(self, work: PartFunction, *given: str, ends_process: bool = True) -> None:
        """Run ``work(*given)`` until it returns or this task is cancelled.

        ``ends_process=False`` is for work on what strangers send: no stranger may be able to end
        this process, or all processes at once by one record, so it begins again for ever.
        """
        part, task = part_name(work), asyncio.current_task()
        failed_s: deque[float] = deque(maxlen=FAILURES_MAX)
        while True:
            try:
                await work(*given)
                return
            except (UserError, MachineError):
                raise
            except (AnabranchError, TimeoutError) as error:
                _log.warning("%s: %s", part, error or type(error).__name__)
                self._on_error(part, error)
            # A cancellation that nobody asked this task for came out of something it waited for.
            except (Exception, asyncio.CancelledError) as error:
                cancelled = task is not None and task.cancelling() > 0
                if cancelled and isinstance(error, asyncio.CancelledError):
                    raise
                self.note(part, error)
                if cancelled:  # it failed as it ended: the cancellation must not be lost
                    raise asyncio.CancelledError from error
                now_s = asyncio.get_running_loop().time()
                failed_s.append(now_s)
                often = len(failed_s) == FAILURES_MAX and now_s - failed_s[0] <= WITHIN_S
                if often and ends_process:
                    raise MachineError(
                        f"{part} failed {FAILURES_MAX} times within {WITHIN_S:.0f} s, at last with"
                        f" {error!r}; the log has the traceback, and starting again may help"
                    ) from error
            await asyncio.sleep(RESTART_S)

    def note(self, part: str, error: BaseException) -> None:
        """Log an unexpected error of ``part`` with its traceback, and count it."""
        self.failures[part] += 1
        _log.error("%s failed", part, exc_info=error)
        self._on_error(part, error)

    def collect(self) -> "Iterator[CounterMetricFamily]":
        """The failures for Prometheus, to whose registry this is a collector."""
        from prometheus_client.core import CounterMetricFamily

        family = CounterMetricFamily(
            "anabranch:part_failures",
            "Unexpected errors, by the part that failed.",
            labels=["part"],
        )
        for part, count in sorted(self.failures.items()):
            family.add_metric([part], count)
        yield family


@asynccontextmanager
async def beside(*works: PartFunction) -> AsyncIterator[None]:
    """Run ``works`` during the block; the error of one ends the block and is raised from it."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work(), name=part_name(work)) for work in works]
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()
    except BaseExceptionGroup as errors:
        first = errors.exceptions[0]
        raise first from first.__cause__


def part_name(work: PartFunction) -> str:
    """The name of a part: that of the function which is its work."""
    while isinstance(work, partial):
        work = work.func
    return work.__qualname__


def run_by_service() -> bool:
    """Whether somebody starts this process again once it has ended with a failure."""
    return bool(os.environ.get(SERVICE_VARIABLE)) or (
        os.environ.get("SYSTEMD_EXEC_PID") == str(os.getpid())
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchdogConfig:
    """When an event loop counts as standing still."""

    still_s: float = 10.0
    """Nothing runs on the loop for longer than a few seconds, heavy imports and solvers included:
    those run in threads and processes."""
    looks: int = 10
    """Looks within that time. A look counts only when this thread itself gets to run, so a machine
    that slept, or a process that was stopped, is not mistaken for a loop that spins."""
    ends_process: bool = False
    """Whether to end the process with code 1: where a service starts it again."""


class Watchdog:
    """Watches an event loop from a thread, and writes the loop's stack where it stands still."""

    def __init__(
        self,
        config: WatchdogConfig,
        *,
        say: Callable[[str], None] | None = None,
        end: Callable[[], None] | None = None,
    ) -> None:
        """``say`` writes what was found, to the log by default; ``end`` ends the process with code
        1, without waiting for its loop."""
        self._config = config
        self._say = say or _log.error
        self._end = end or partial(os._exit, 1)
        self._answered = True
        self._unanswered = 0
        self._stopped = threading.Event()

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Watch the running loop within the block."""
        loop, ident = asyncio.get_running_loop(), threading.get_ident()
        thread = threading.Thread(
            target=self._watch, args=(loop, ident), name="watchdog", daemon=True
        )
        thread.start()
        try:
            yield
        finally:
            self._stopped.set()

    def _watch(self, loop: asyncio.AbstractEventLoop, ident: int) -> None:
        every_s = self._config.still_s / self._config.looks
        while not self._stopped.wait(every_s):
            if not self._look(loop):
                return
            if self._unanswered == self._config.looks:
                self._found(ident)

    def _look(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Count a look; False where the loop has been closed."""
        if self._answered:
            if self._unanswered >= self._config.looks:
                self._say("the event loop goes on")
            self._answered, self._unanswered = False, 0
            try:
                loop.call_soon_threadsafe(self._answer)
            except RuntimeError:
                return False
        else:
            self._unanswered += 1
        return True

    def _answer(self) -> None:
        self._answered = True

    def _found(self, ident: int) -> None:
        frame = sys._current_frames().get(ident)
        stack = "" if frame is None else "".join(traceback.format_stack(frame))
        ends = self._config.ends_process
        then = "; this process ends, to be started again" if ends else ""
        self._say(f"the event loop stands still for {self._config.still_s:.0f} s{then}:\n{stack}")
        if ends:
            sys.stderr.flush()
            self._end()
