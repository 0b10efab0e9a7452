"""Every command's --help fits a screen and shows an example; --help-all leaves nothing out."""

import re
import runpy
import sys
from contextlib import redirect_stdout
from functools import cache
from importlib.util import find_spec
from io import StringIO
from pathlib import Path

import pytest

from node.peer.join_options import join_parser

ROOT = Path(__file__).parents[2]
COMMANDS = (
    "node.join",
    "node.alive",
    "node.doctor",
    "node.plan",
    "node.profile",
    "node.weight_hashes",
    "client.generate",
    "client.chat",
    "client.gateway",
    "client.health",
    "client.status",
    "client.models",
    "client.networks",
    "anabranch.update",
    "client.invite",
    "client.forget",
    "coordinator.plan",
    "coordinator.simulate",
    "bench.demo",
    "bench.fleet",
    "bench.papers.simulate",
    "models.sample",
    "models.stories",
    "models.train",
)
LINES_MAX, COLUMNS = 40, 80


def test_no_command_is_missing_here() -> None:
    found = set()
    for room in ("node", "client", "coordinator", "dht"):
        for path in (ROOT / room).rglob("*.py"):
            if "Parser(\n" in (text := path.read_text()) and '__name__ == "__main__"' in text:
                name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
                found.add(name.removesuffix(".__main__"))
    for guide in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        rooms = r"python -m ((?:node|client|coordinator)\.\w+|bench\.demo)"
        found |= set(re.findall(rooms, guide.read_text()))
    assert found <= set(COMMANDS)


def said_by(command: str, *words: str) -> list[str]:
    """What ``python -m command`` prints with these words, run within this process."""
    out = StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out):
        patch.setenv("COLUMNS", str(COLUMNS))
        patch.setattr(sys, "argv", [command, *words])
        patch.delitem(sys.modules, running(command), raising=False)
        with pytest.raises(SystemExit) as ended:
            runpy.run_module(command, run_name="__main__", alter_sys=True)
    assert not ended.value.code
    return out.getvalue().splitlines()


def running(command: str) -> str:
    """The module that ``python -m command`` runs. The package around it stays: one that is imported
    anew is another than its modules' own, for every test after this one."""
    spec = find_spec(command)
    assert spec is not None
    return f"{command}.__main__" if spec.submodule_search_locations else command


@cache
def shown_by(command: str, flag: str = "--help") -> list[str]:
    return said_by(command, flag)


def flags_in(shown: list[str]) -> set[str]:
    """Flags that have a line of their own."""
    return set(re.findall(r"^  (?:-\w, )?(--[a-z0-9-]+)", "\n".join(shown), re.MULTILINE))


def test_flags_that_say_which_swarm_are_the_same_everywhere() -> None:
    commands = (
        "node.join",
        "node.doctor",
        "client.generate",
        "client.chat",
        "client.gateway",
        "client.health",
        "client.status",
    )
    flags = ("anabranch:…", "--local")
    said = [
        tuple(
            " ".join(line.split())
            for line in shown_by(command)
            if line.startswith(tuple(f"  {flag}" for flag in flags))
        )
        for command in commands
    ]
    assert len(said[0]) == len(flags)
    assert len(set(said)) == 1
    for command in set(commands) - {"node.doctor"}:
        assert "hub id" in " ".join(shown_by(command)), command


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_a_screen_and_shows_an_example(command: str) -> None:
    shown = shown_by(command)
    assert len(shown) <= LINES_MAX
    assert max(map(len, shown)) <= COLUMNS
    if not command.startswith(("bench", "models")):
        assert not [line for line in shown if line.endswith("-")], "a line ends within a word"
    text = " ".join(" ".join(shown).split())
    assert "example" in text
    assert f"python -m {command} " in text.partition("example")[2]


@pytest.mark.parametrize("command", ["coordinator.plan", "coordinator.simulate"])
def test_worked_examples_print_what_help_says(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = (ROOT / "docs" / "cluster-format.md").read_text()
    (tmp_path / "two.json").write_text(document.split("```json")[1].split("```")[0])
    shown = "\n".join(shown_by(command))
    (example,) = re.findall(rf"^  python -m {command} (two\.json.*)\n((?:  > .*\n)+)", shown, re.M)
    monkeypatch.chdir(tmp_path)
    printed = " ".join(said_by(command, *example[0].split()))
    said = example[1].replace("  > ", "").splitlines()
    assert all(line in " ".join(printed.split()) for line in said), (said, printed)


def test_the_first_help_that_people_read_fits_a_small_terminal() -> None:
    for command in ("node.join", "client.generate", "client.chat"):
        assert len(shown_by(command)) < 24, "with the prompt below it, it fills a terminal"


def test_exit_codes_have_a_line_of_their_own() -> None:
    for command in ("node.join", "client.generate", "coordinator.plan"):
        (line,) = [each for each in shown_by(command) if "exit codes" in each]
        assert line.startswith("exit codes: 0 ")


@pytest.mark.parametrize("command", ["node.join", "client.generate", "client.chat"])
def test_what_help_leaves_out_help_all_shows(command: str) -> None:
    usual, every = flags_in(shown_by(command)), flags_in(shown_by(command, "--help-all"))
    every -= {"--help", "--help-all"}
    assert usual < every
    assert shown_by(command)[-1] == f"--help-all shows {len(every - usual)} more options"


def test_no_option_is_hidden() -> None:
    parser = join_parser()
    accepted = {option for action in parser._actions for option in action.option_strings}
    assert flags_in(parser.format_help_all().splitlines()) == accepted - {"-h"}
