"""Trials of strangers' grammars: in bounded time, remembered, and ended with who asked."""

import asyncio
import subprocess
import sys
from dataclasses import replace
from typing import Any, cast

import psutil
import pytest

from dht.grammars import trials
from dht.grammars.starters import Copies, Starter, Starts
from dht.grammars.trials import GrammarTrials, TrialLimits, TrialsBusyError

DEAR = b"start: X\nX: " + b" & ".join(b"/.*a.{%d}b.*/" % at for at in range(5, 40))
PATIENT = TrialLimits(answer_s=60.0)


@pytest.fixture(autouse=True, params=[Copies, Starts])
def starter(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type:
    """Each way to start trials in turn."""
    if request.param is Copies and sys.platform != "linux":
        pytest.skip("processes are copied on Linux")

    def made(owner: object) -> Starter:
        return Copies(owner) if request.param is Copies else Starts()

    monkeypatch.setattr(trials, "starter_of", made)
    return cast("type", request.param)


async def test_what_is_wrong_with_a_grammar_is_said() -> None:
    found = GrammarTrials(PATIENT)
    assert await found.fault("a", b'start: "x"') == ""
    assert "uniqueItems" in await found.fault("a", b'start: %json {"uniqueItems": true}')


@pytest.mark.parametrize("term", ["<[151657]>", "<[90000-151657]>", "<[0-31999,151657]>"])
async def test_ids_of_a_large_vocabulary_may_be_named(term: str) -> None:
    grammar = f"start: {term} TEXT {term}\nTEXT: /[a-z]+/"
    assert await GrammarTrials(PATIENT).fault("a", grammar.encode()) == ""


def test_a_refusal_is_remembered(monkeypatch: pytest.MonkeyPatch, starter: type) -> None:
    async def scenario() -> int:
        found, started = GrammarTrials(PATIENT), 0
        said_of = starter.said_of

        async def counted(*asked: Any) -> bytes:
            nonlocal started
            started += 1
            return cast("bytes", await said_of(*asked))

        monkeypatch.setattr(starter, "said_of", counted)
        for _ in range(3):
            assert "too much time" in await found.fault("a", DEAR)
        return started

    assert asyncio.run(scenario()) == 1


def trying() -> list[psutil.Process]:
    """Processes that try a grammar: they give way to this one."""
    own = psutil.Process()
    return [each for each in own.children(recursive=True) if each.nice() > own.nice()]


async def test_a_trial_ends_with_who_asked() -> None:
    found = GrammarTrials(replace(PATIENT, cpu_s=60.0))
    asked = asyncio.create_task(found.fault("a", DEAR))
    running: list[psutil.Process] = []
    while not running:
        running = await asyncio.to_thread(trying)
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    psutil.wait_procs(running)
    assert await found.fault("b", b'start: "x"') == ""


@pytest.mark.skipif(sys.platform != "linux", reason="processes are copied on Linux")
async def test_a_process_that_was_ended_is_started_again(starter: type) -> None:
    """What is copied may be ended by the system, for want of memory."""
    found, before = GrammarTrials(PATIENT), psutil.Process().children()
    assert await found.fault("a", b'start: "x"') == ""
    if starter is Copies:
        (copied,) = set(psutil.Process().children()) - set(before)
        copied.kill()
        copied.wait()
    assert await found.fault("a", b'start: "y"') == ""


def test_most_grammars_are_tried_without_starting_a_program(
    monkeypatch: pytest.MonkeyPatch, starter: type
) -> None:
    """A start takes ten times as long as most trials, at the niceness of strangers' work."""

    async def scenario() -> int:
        found, started = GrammarTrials(PATIENT), 0
        popen = subprocess.Popen.__init__

        def counted(self: "subprocess.Popen[bytes]", *given: Any, **named: Any) -> None:
            nonlocal started
            started += 1
            popen(self, *given, **named)

        monkeypatch.setattr(subprocess.Popen, "__init__", counted)
        for at in range(5):
            assert await found.fault("a", b'start: "%d"' % at) == ""
        return started

    assert asyncio.run(scenario()) == (1 if starter is Copies else 5)


def test_who_waits_is_answered_before_a_client_would_blame_the_stage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def never(*_: object) -> str:
        await asyncio.Event().wait()
        return ""

    async def scenario() -> None:
        monkeypatch.setattr(GrammarTrials, "_try", never)
        found = GrammarTrials(TrialLimits(answer_s=0.05))
        with pytest.raises(TrialsBusyError):
            await found.fault("a", b'start: "x"')

    asyncio.run(scenario())
    assert trials.TrialLimits().answer_s < 10
