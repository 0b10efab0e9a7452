"""A swarm for threads: whatever ends a call, its answer has ended with it, and nobody waits on."""

import asyncio
import gc
import os
import signal
import sys
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, cast

import pytest

from client import BlockingSwarm, Piece, Swarm
from client.errors import ClosedError

PIECE = Piece(text="Once", token_ids=(1,))
MAIN = threading.main_thread()


class _Endless:
    """A swarm whose answers never come to an end, and take a while to be ended."""

    def __init__(self, on_wait: Callable[[], object] = lambda: None) -> None:
        self.begun, self.running = threading.Event(), 0
        self._on_wait = on_wait

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[Swarm]:
        self.running += 1
        try:
            yield cast(Swarm, self)
        finally:
            await asyncio.sleep(0.01)
            self.running -= 1

    @asynccontextmanager
    async def connecting(self) -> AsyncIterator[Swarm]:
        async with self.connected() as swarm:
            await self.generate()
            yield swarm

    async def generate(self, *_: Any) -> Any:
        self.running += 1
        try:
            if not self.begun.is_set():
                self.begun.set()
                self._on_wait()
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01)
            self.running -= 1

    async def stream(self, *_: Any) -> AsyncGenerator[Piece, None]:
        yield PIECE
        await self.generate()


def _interrupt() -> None:
    assert MAIN.ident is not None
    signal.pthread_kill(MAIN.ident, signal.SIGINT)


@pytest.fixture
def unraisable(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What Python could not raise, and would print."""
    said: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", said.append)
    return said


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="needs POSIX signals")
@pytest.mark.parametrize(
    "ask",
    [
        lambda swarm: swarm.generate("Once"),
        lambda swarm: swarm.generate_all([("Once", None)] * 3, 2),
        lambda swarm: list(swarm.stream("Once")),
    ],
)
def test_an_interrupt_is_raised_once_the_answer_has_ended(
    ask: Callable[[BlockingSwarm], object],
) -> None:
    endless = _Endless(_interrupt)
    with BlockingSwarm(endless.connected()) as swarm:
        with pytest.raises(KeyboardInterrupt):
            ask(swarm)
        assert endless.running == 1  # the swarm itself
    assert endless.running == 0


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="needs POSIX signals")
def test_an_interrupted_entering_leaves_nothing_behind(unraisable: list[Any]) -> None:
    endless, before = _Endless(_interrupt), threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        BlockingSwarm(endless.connecting())
    gc.collect()
    assert (endless.running, threading.active_count(), unraisable) == (0, before, [])


@pytest.mark.timeout(60)
def test_who_waits_hears_that_the_swarm_was_closed() -> None:
    endless = _Endless()
    swarm = BlockingSwarm(endless.connected())
    with ThreadPoolExecutor() as threads:
        asked = threads.submit(swarm.generate, "Once")
        endless.begun.wait()
        swarm.close()
        with pytest.raises(ClosedError):
            asked.result()
    assert endless.running == 0


def test_an_answer_left_open_ends_with_the_swarm(unraisable: list[Any]) -> None:
    endless = _Endless()
    with BlockingSwarm(endless.connected()) as swarm:
        pieces, others = swarm.stream("Once"), swarm.stream("Once")
        assert [next(pieces), next(others)] == [PIECE, PIECE]
    with pytest.raises(ClosedError):
        next(pieces)
    del pieces, others
    gc.collect()
    assert (endless.running, unraisable) == (0, [])


@pytest.mark.timeout(60)
def test_a_callback_is_told_that_it_cannot_wait() -> None:
    raised: list[BaseException] = []

    def ask() -> None:
        try:
            swarm.generate("Once")
        except RuntimeError as error:
            raised.append(error)
        swarm.close()

    endless = _Endless(ask)
    swarm = BlockingSwarm(endless.connected())
    with pytest.raises(ClosedError):
        swarm.generate("Once")
    swarm.close()
    assert ["callback" in str(error) for error in raised] == [True]


@pytest.mark.timeout(60)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_callback_that_ends_the_program_ends_the_swarm() -> None:
    endless = _Endless(sys.exit)
    swarm = BlockingSwarm(endless.connected())
    with pytest.raises(SystemExit):
        swarm.generate("Once")
    swarm.close()
    assert endless.running == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_leaves_its_parents_swarm_alone() -> None:
    class _Quick(_Endless):
        async def generate(self, *_: Any) -> Any:
            return PIECE

    connected: AbstractAsyncContextManager[Swarm] = _Quick().connected()
    with BlockingSwarm(connected) as swarm:
        if (child := os.fork()) == 0:
            try:
                swarm.generate("Once")
            except ClosedError:
                swarm.close()
                os._exit(7)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert cast(Any, swarm.generate("Once")) == PIECE
