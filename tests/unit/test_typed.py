"""Every command in the documents is one, with flags that it has; every program is Python."""

import ast
import importlib.util
import pkgutil
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

import anabranch
from anabranch.commands import COMMANDS
from dht.command_line import Parser
from testing.documents import PAGES, Typed, commands, programs

ROOT = Path(__file__).parents[2]
OURS = {command.function.partition(":")[0]: command.function for command in COMMANDS.values()} | {
    "client.gateway": "client.gateway.__main__:run",
    "client.health": "client.health.__main__:run",
    "coordinator.plan": "coordinator.plan:main",
    "node.profile": "node.profile:run",
    "node.weight_hashes": "node.weight_hashes:run",
}
"""Functions that run the modules that documents name."""
PLACEHOLDERS = {"COMMAND", "MODULE"}
SHOWN_OTHERWISE = re.compile(r"\[.*|.*\]")
"""Words of a synopsis that nobody types."""


class Parsed(BaseException):
    """The command line was understood."""


@pytest.fixture
def stops_when_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    parse = Parser.parse_args

    def stop(self: Parser, *given: Any) -> NoReturn:
        parse(self, *given)
        raise Parsed

    monkeypatch.setattr(Parser, "parse_args", stop)


def all_typed() -> Iterator[Typed]:
    seen = set()
    for page in PAGES:
        for each in commands(page):
            if each.words not in seen and each.words[0] not in PLACEHOLDERS:
                seen.add(each.words)
                yield each


@pytest.mark.parametrize("typed", [*all_typed()], ids=str)
def test_a_command_of_the_documents_has_these_flags(
    typed: Typed,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    stops_when_parsed: None,
) -> None:
    name, *rest = typed.words
    if name.partition(".")[0] in {"bench", "tests"} or name in {"venv", "pip"}:
        assert importlib.util.find_spec(name) is not None
        return
    function = COMMANDS[name].function if name in COMMANDS else OURS[name]
    words = [word for word in rest if not SHOWN_OTHERWISE.fullmatch(word)]
    monkeypatch.setattr("sys.argv", [f"anabranch {name}", *words])
    # A bare name in the text, such as `python -m node.profile`, is no whole command line.
    if not words or name == "completion":
        assert callable(pkgutil.resolve_name(function))
        return
    with pytest.raises((Parsed, SystemExit)) as ended:
        sys.exit(pkgutil.resolve_name(function)())
    if isinstance(ended.value, SystemExit) and ended.value.code != 0:
        # A flag that is only named, such as `anabranch plan --gpus`, lacks its value.
        assert words[-1].startswith("--")
        assert f"{words[-1]}: expected" in capsys.readouterr().err


def test_there_are_commands_of_each_kind() -> None:
    named = {each.words[0] for each in all_typed()}
    assert {"join", "ask", "serve", "plan", "page", "bench"} <= named


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.name))
def test_a_program_of_the_documents_is_python_and_imports_what_we_give(page: Path) -> None:
    for program in programs(page):
        for node in ast.walk(ast.parse(program)):
            if isinstance(node, ast.ImportFrom) and node.module == "anabranch":
                assert {alias.name for alias in node.names} <= set(anabranch.__all__)


def test_make_has_the_targets_that_documents_name() -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for page in PAGES:
        text = page.read_text()
        named = re.findall(r"^ {4,7}make ([a-z-]+)|`make ([a-z-]+)", text, re.MULTILINE)
        assert {a or b for a, b in named} <= set(targets), page.name
