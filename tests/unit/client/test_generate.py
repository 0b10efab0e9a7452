"""``anabranch ask``: the answer, and notes beside it, as a terminal shows them."""

import argparse
import asyncio
import io
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from client import generate
from client.answer.answer import Answer, Piece
from client.errors import RequestRefusedError
from client.text.tokenizer import ModelText
from dht.command_line import EXIT_USER, exit_code_of
from dht.errors import SwarmError
from dht.messages.session import FinishReason

ARGUMENTS = argparse.Namespace(
    json=False,
    raw=True,
    wait=1.0,
    prompt="One",
    prompt_ids=None,
    stop_token_ids=[],
    logit_bias=[],
)
FIGURES = "2 tokens after a prompt of 1 (length): first after 0.10 s, 10.0 tokens/s over "


class Screen(io.StringIO):
    """A terminal, to which both streams go."""

    def isatty(self) -> bool:
        return True


class Running:
    """An answer of two pieces, with something to tell in between."""

    def __init__(self, between: Callable[[], None]) -> None:
        self._between = between

    async def __aiter__(self) -> AsyncIterator[Piece]:
        yield SimpleNamespace(text=" morning", token_ids=(1,))  # type: ignore[misc]
        self._between()
        yield SimpleNamespace(text=" came", token_ids=(2,))  # type: ignore[misc]

    def answer(self) -> Answer:
        return Answer(
            text=" morning came",
            token_ids=(1, 2),
            prompt_tokens=1,
            finish_reason=FinishReason.LENGTH,
            ttft_s=0.1,
            tpot_s=0.1,
            computed_s=0.0,
            waited_s=0.0,
            route=(),
            plan_version="1.1",
            fingerprint="",
            failovers=0,
        )


def asked(monkeypatch: pytest.MonkeyPatch, tell: Callable[[Callable[[str], None]], None]) -> str:
    """What the screen has after an answer, in whose midst ``tell`` tells something."""

    @asynccontextmanager
    async def swarm(_: object, on_status: Any, **__: object) -> AsyncIterator[SimpleNamespace]:
        async def ready_text() -> None:
            return None

        yield SimpleNamespace(
            text=ModelText(name="brook", tokenizer=object()),  # type: ignore[arg-type]
            ready_text=ready_text,
            begin=lambda *_: Running(lambda: tell(on_status)),
            view=SimpleNamespace(nodes={}),
        )

    def kept(*_: object) -> None:
        print("network home is remembered", file=sys.stderr)

    screen = Screen()
    monkeypatch.setattr(generate, "settled_swarm", swarm)
    monkeypatch.setattr(generate, "remember_swarm", kept)
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(sys, "stderr", screen)
    try:
        asyncio.run(generate.main(ARGUMENTS))
    except SwarmError as error:
        print(f"error: {error}", file=sys.stderr)
    return screen.getvalue()


def test_what_is_remembered_is_said_below_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = asked(monkeypatch, lambda _: None)
    assert shown == f" morning came\nnetwork home is remembered\n{FIGURES}\n"


def test_a_note_in_mid_answer_has_its_own_line(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = asked(monkeypatch, lambda note: note("waiting: layer 3 is held by nobody"))
    assert shown.startswith(" morning\nwaiting: layer 3 is held by nobody\n came\n")


def test_an_error_in_mid_answer_has_its_own_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> None:
        raise SwarmError("layer 3 is held by nobody")

    assert asked(monkeypatch, fail) == " morning\nerror: layer 3 is held by nobody\n"


def test_what_no_peer_takes_is_the_askers_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    """Code 2: the same command cannot work later either (docs/ask.md)."""

    def ask() -> int:
        raise RequestRefusedError("the grammar: lexer error")

    assert exit_code_of(ask) == EXIT_USER
    assert capsys.readouterr().err == "error: the grammar: lexer error\n"
