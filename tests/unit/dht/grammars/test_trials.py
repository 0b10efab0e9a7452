"""Trials of strangers' grammars: in bounded time, remembered, and ended with who asked."""

import asyncio
from dataclasses import replace

import pytest

from dht.grammars import trials
from dht.grammars.trials import GrammarTrials, TrialLimits, TrialsBusyError

DEAR = b"start: X\nX: " + b" & ".join(b"/.*a.{%d}b.*/" % at for at in range(5, 40))
LIMITS = TrialLimits(short_cpu_s=0.3, long_cpu_s=0.4, short_niceness=0, long_niceness=0)
PATIENT = replace(LIMITS, answer_s=60.0)


def test_what_is_wrong_with_a_grammar_is_said() -> None:
    async def scenario() -> None:
        found = GrammarTrials(PATIENT)
        assert await found.fault("a", b'start: "x"') == ""
        assert "uniqueItems" in await found.fault("a", b'start: %json {"uniqueItems": true}')

    asyncio.run(scenario())


@pytest.mark.parametrize("term", ["<[151657]>", "<[90000-151657]>", "<[0-31999,151657]>"])
def test_ids_of_a_large_vocabulary_may_be_named(term: str) -> None:
    async def scenario() -> None:
        grammar = f"start: {term} TEXT {term}\nTEXT: /[a-z]+/"
        assert await GrammarTrials(PATIENT).fault("a", grammar.encode()) == ""

    asyncio.run(scenario())


def test_a_refusal_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> int:
        found, started = GrammarTrials(PATIENT), 0
        create = asyncio.create_subprocess_exec

        async def counted(*command: str, **options: int) -> asyncio.subprocess.Process:
            nonlocal started
            started += 1
            return await create(*command, **options)

        monkeypatch.setattr(asyncio, "create_subprocess_exec", counted)
        for _ in range(3):
            assert "too much time" in await found.fault("a", DEAR)
        return started

    assert asyncio.run(scenario()) == 2  # short, and then long


def test_a_trial_ends_with_who_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        processes: list[asyncio.subprocess.Process] = []
        started = asyncio.Event()
        create = asyncio.create_subprocess_exec

        async def kept(*command: str, **options: int) -> asyncio.subprocess.Process:
            processes.append(await create(*command, **options))
            started.set()
            return processes[-1]

        monkeypatch.setattr(asyncio, "create_subprocess_exec", kept)
        found = GrammarTrials(replace(PATIENT, short_cpu_s=60.0))
        asked = asyncio.create_task(found.fault("a", DEAR))
        await started.wait()
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        assert [process.returncode for process in processes] == [-9]
        assert await found.fault("b", b'start: "x"') == ""

    asyncio.run(scenario())


def test_who_waits_is_answered_before_a_client_would_blame_the_stage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def never(*_: object) -> str:
        await asyncio.Event().wait()
        return ""

    async def scenario() -> None:
        monkeypatch.setattr(GrammarTrials, "_try", never)
        found = GrammarTrials(replace(LIMITS, answer_s=0.05))
        with pytest.raises(TrialsBusyError):
            await found.fault("a", b'start: "x"')

    asyncio.run(scenario())
    assert trials.TrialLimits().answer_s < 10
