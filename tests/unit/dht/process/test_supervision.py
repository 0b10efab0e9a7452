"""Parts that fail are set up again; one that fails again and again ends the process."""

import argparse
import asyncio
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Coroutine
from typing import Any

import pytest

from dht.command_line import EXIT_MACHINE, EXIT_USER, command_of
from dht.errors import MachineError, NetworkError, PeerError, SwarmError, UserError
from dht.process.supervision import (
    FAILURES_MAX,
    RESTART_S,
    SERVICE_VARIABLE,
    WITHIN_S,
    Supervisor,
    Watchdog,
    WatchdogConfig,
    beside,
)
from testing.clock import run_virtual

EMFILE = OSError(24, "Too many open files")


class Part:
    """A part that raises, one after the other, ``errors`` ``every_s`` after it began."""

    def __init__(self, *errors: BaseException, every_s: float = 0.0) -> None:
        self.errors = list(errors)
        self.every_s = every_s
        self.begun = 0
        self.works = asyncio.Event()

    async def run(self) -> None:
        self.begun += 1
        await asyncio.sleep(self.every_s)
        if self.errors:
            raise self.errors.pop(0)
        self.works.set()
        await asyncio.Event().wait()


def virtually(body: Coroutine[Any, Any, None]) -> None:
    run_virtual(body, limit_s=10_000)


@pytest.mark.parametrize("error", [EMFILE, ValueError("no"), asyncio.CancelledError()])
def test_a_part_that_fails_begins_again_and_is_counted_and_logged_once(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    async def body() -> None:
        told: list[tuple[str, BaseException]] = []
        parts = Supervisor(lambda *each: told.append(each))
        part, other = Part(error), Part()
        async with parts.beside(part.run, other.run):
            await part.works.wait()
            assert asyncio.get_running_loop().time() == pytest.approx(RESTART_S)
        assert (part.begun, other.begun) == (2, 1), "the other part was not touched"
        assert parts.failures == {"Part.run": 1}
        assert told == [("Part.run", error)]
        (record,) = [each for each in caplog.records if each.levelno >= logging.WARNING]
        assert record.exc_info is not None
        assert record.exc_info[1] is error

    virtually(body())


@pytest.mark.parametrize(
    "error", [NetworkError("away"), PeerError("broke it"), SwarmError("full"), TimeoutError()]
)
def test_errors_of_others_end_nothing_and_count_for_nothing(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    async def body() -> None:
        parts, part = Supervisor(), Part(*[error] * 10)
        async with parts.beside(part.run):
            await part.works.wait()
        assert not parts.failures
        assert not any(record.exc_info for record in caplog.records)

    virtually(body())


@pytest.mark.parametrize("error", [UserError("a mistake"), MachineError("the GPU is gone")])
def test_what_cannot_help_itself_ends_the_block_at_once(error: Exception) -> None:
    async def body() -> None:
        part = Part(error)
        with pytest.raises(type(error), match=str(error)):
            async with Supervisor().beside(part.run):
                await asyncio.Event().wait()
        assert part.begun == 1

    virtually(body())


def test_three_failures_in_a_minute_end_the_block() -> None:
    async def body() -> None:
        parts, part = Supervisor(), Part(*[EMFILE] * 10)
        with pytest.raises(MachineError, match=r"Part\.run failed 3 times within 60 s.*Too many"):
            async with parts.beside(part.run, Part().run):
                await asyncio.Event().wait()
        assert part.begun == FAILURES_MAX
        assert asyncio.all_tasks() == {asyncio.current_task()}

    virtually(body())


def test_failures_further_apart_do_not() -> None:
    async def body() -> None:
        part = Part(*[EMFILE] * 10, every_s=WITHIN_S / 2)
        async with Supervisor().beside(part.run):
            await part.works.wait()

    virtually(body())


def test_no_remote_peer_can_end_this_process() -> None:
    async def body() -> None:
        parts, part = Supervisor(), Part(*[EMFILE] * 10)
        keeping = asyncio.create_task(parts.keep(part.run, ends_process=False))
        await part.works.wait()
        assert parts.failures.total() == 10
        keeping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await keeping

    virtually(body())


def test_a_part_that_fails_as_it_ends_still_ends() -> None:
    async def body() -> None:
        parts = Supervisor()

        async def stubborn() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                raise EMFILE  # such as a last save that finds the disk full

        async with parts.beside(stubborn):
            await asyncio.sleep(1)
        assert parts.failures.total() == 1
        assert asyncio.get_running_loop().time() == 1

    virtually(body())


def test_the_blocks_own_error_comes_out_as_it_is() -> None:
    async def body() -> None:
        cause = OSError("the port is taken")
        with pytest.raises(UserError, match="another port") as caught:
            async with beside(Part().run):
                raise UserError("choose another port") from cause
        assert caught.value.__cause__ is cause

    virtually(body())


@pytest.mark.parametrize(
    ("errors", "code"), [([EMFILE] * 3, EXIT_MACHINE), ([UserError("a mistake")], EXIT_USER)]
)
def test_a_command_ends_in_one_plain_line(
    errors: list[Exception],
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("dht.process.supervision.RESTART_S", 0.0)

    async def main(arguments: argparse.Namespace) -> int:
        async with Supervisor().beside(Part(*errors).run):
            await asyncio.Event().wait()
        return 0

    assert command_of(argparse.Namespace, main)() == code
    (line,) = [each for each in capsys.readouterr().err.splitlines() if each.startswith("error: ")]
    assert "Traceback" not in line


class Watched:
    """A watchdog with quick looks, and what it said."""

    def __init__(self, *, ends_process: bool = False) -> None:
        self.said: list[str] = []
        self.found = threading.Event()
        self.ended = threading.Event()
        config = WatchdogConfig(still_s=0.1, looks=10, ends_process=ends_process)
        self.dog = Watchdog(config, say=self._say, end=self.ended.set)

    def _say(self, text: str) -> None:
        self.said.append(text)
        self.found.set()


def _spins_until(event: threading.Event) -> None:
    while not event.wait(0.001):
        pass


@pytest.mark.parametrize("ends_process", [False, True])
def test_a_loop_that_stands_still_is_seen_with_its_stack(ends_process: bool) -> None:
    watched = Watched(ends_process=ends_process)

    async def body() -> None:
        async with watched.dog.watching():
            _spins_until(watched.ended if ends_process else watched.found)

    asyncio.run(body())
    assert "stands still" in watched.said[0]
    assert "_spins_until" in watched.said[0]
    assert watched.ended.is_set() is ends_process


def test_a_loop_that_runs_is_left_alone() -> None:
    watched = Watched(ends_process=True)

    async def body() -> None:
        for _ in range(30):
            watched.dog._look(asyncio.get_running_loop())
            assert watched.dog._unanswered == 0
            await asyncio.sleep(0)

    asyncio.run(body())
    assert not watched.said


async def test_a_process_that_was_stopped_is_no_loop_that_stands_still() -> None:
    """After a machine slept, one look is late, however late it is: looks count, not seconds."""
    watched = Watched(ends_process=True)

    loop = asyncio.get_running_loop()
    watched.dog._look(loop)
    for _ in range(9):
        watched.dog._look(loop)
    assert not watched.said
    await asyncio.sleep(0)
    watched.dog._look(loop)
    assert watched.dog._unanswered == 0


SPINS = """
import argparse, asyncio, sys
from dht import command_line
from dht.process import supervision
supervision.WatchdogConfig.__init__.__kwdefaults__.update(still_s=0.3)
async def main(arguments):
    while True:
        pass
sys.exit(command_line.command_of(argparse.Namespace, main)())
"""


def test_a_command_of_a_service_ends_with_1_when_its_loop_stands_still() -> None:
    environment = {**os.environ, SERVICE_VARIABLE: "1"}
    ended = subprocess.run(
        [sys.executable, "-c", SPINS],
        check=False,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == EXIT_MACHINE
    assert "in main" in ended.stderr
