"""Every command's --help fits a screen and shows an example."""

import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMMANDS = (
    "node.join",
    "node.profile",
    "node.weight_hashes",
    "client.generate",
    "client.chat",
    "client.gateway",
    "client.health",
    "coordinator.plan",
    "coordinator.simulate",
)
LINES_MAX, COLUMNS = 40, 100


def test_no_command_is_missing_here() -> None:
    found = set()
    for room in ("node", "client", "coordinator", "dht"):
        for path in (ROOT / room).rglob("*.py"):
            if "Parser(\n" in (text := path.read_text()) and '__name__ == "__main__"' in text:
                name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
                found.add(name.removesuffix(".__main__"))
    assert found <= set(COMMANDS)


@cache
def shown_by(command: str) -> list[str]:
    return subprocess.run(
        [sys.executable, "-m", command, "--help"],
        cwd=ROOT,
        env={"COLUMNS": str(COLUMNS), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()


def test_flags_that_say_which_swarm_are_the_same_everywhere() -> None:
    commands = ("node.join", "client.generate", "client.chat", "client.gateway", "client.health")
    flags = ("--initial-peers", "--network", "--transport")
    said = [
        tuple(line for line in shown_by(command) if line.strip().startswith(flags))
        for command in commands
    ]
    assert len(said[0]) == len(flags)
    assert len(set(said)) == 1
    for command in commands:
        assert "hub id" in " ".join(shown_by(command)), command


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_a_screen_and_shows_an_example(command: str) -> None:
    shown = shown_by(command)
    assert len(shown) <= LINES_MAX
    assert max(map(len, shown)) <= COLUMNS
    text = " ".join(" ".join(shown).split())
    assert "example" in text
    assert f"python -m {command} " in text.partition("example")[2]
