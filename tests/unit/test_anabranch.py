"""One command starts all others, and imports what it needs when it needs it."""

import asyncio
import json
import os
import subprocess
import sys
import tomllib
import warnings
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

import anabranch
import client
from anabranch import commands
from anabranch.commands import COMMANDS
from dht.command_line import EXIT_INTERRUPTED
from node import VERSION

ROOT = Path(__file__).parents[2]
HEAVY = (
    *("torch", "transformers", "hivemind", "numpy", "ortools", "networkx", "aiohttp", "rich"),
    "zeroconf",
)
IMPORTED = """
import json, runpy, sys
sys.argv = ["anabranch", *json.loads(sys.argv[1])]
try:
    runpy.run_module("anabranch", run_name="__main__")
except SystemExit as end:
    code = end.code
print("\\n" + json.dumps([code, sorted({name.partition(".")[0] for name in sys.modules})]))
"""


def ran(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """``anabranch`` with these words, within this process."""
    out, error = StringIO(), StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(error):
        for name, value in environment.items():
            patch.setenv(name, value)
        patch.setenv("COLUMNS", "80")
        patch.setattr(sys, "argv", ["anabranch", *words])
        patch.setattr(warnings, "showwarning", warnings.showwarning)  # the command sets another
        try:
            code = commands.main()
        except SystemExit as ended:
            code = int(ended.code or 0)
    return subprocess.CompletedProcess(words, code, out.getvalue(), error.getvalue())


def imported_by(*words: str) -> tuple[int, set[str]]:
    """The exit code of a command, and the packages that its process had imported at its end."""
    out = subprocess.run(
        [sys.executable, "-c", IMPORTED, json.dumps(words)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    code, names = json.loads(out.splitlines()[-1])
    return code or 0, set(names)


def test_help_names_every_command_and_imports_none() -> None:
    code, names = imported_by("--help")
    assert code == 0
    assert not names & {"client", "node", "coordinator", "dht", "msgspec", *HEAVY}
    shown = ran("--help").stdout
    assert shown == ran().stdout
    for name, command in COMMANDS.items():
        assert f"  {name:<12}{command.about}\n" in shown
    assert max(map(len, shown.splitlines())) <= 80
    assert len(shown.splitlines()) < 24, "with the prompt below it, it fills a terminal"


def test_version_is_that_of_the_package() -> None:
    code, names = imported_by("--version")
    assert code == 0
    assert not names & {"client", "coordinator", "dht", *HEAVY}
    assert ran("--version").stdout == f"anabranch {VERSION}\n"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == VERSION
    assert project["scripts"] == {"anabranch": "anabranch.commands:main"}


@pytest.mark.parametrize("words", [("ask", "--help"), ("ask", "--prompt", "x"), ("forget",)])
def test_who_asks_waits_for_nothing_that_a_peer_needs(words: tuple[str, ...]) -> None:
    _, names = imported_by(*words)
    assert "client" in names
    assert not names & {"node", *HEAVY}


def test_the_help_of_no_command_waits_for_torch() -> None:
    """The completion shows the help of every command, each time that a shell starts."""
    code, names = imported_by("completion", "bash")
    assert code == 0
    assert {"client", "coordinator", "node"} <= names
    assert not {"torch", "transformers", "ortools", "hivemind"} & names


def test_what_is_no_command_says_so() -> None:
    done = ran("serf")
    assert done.returncode == 2
    assert done.stdout == ""
    assert (
        done.stderr
        == "error: 'serf' is no command; did you mean serve? (anabranch --help lists them)\n"
    )


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_help_of_each_speaks_of_the_one_command(name: str) -> None:
    shown = ran(name, "--help")
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.startswith(f"usage: anabranch {name}")
    assert f"anabranch {name}" in shown.stdout.partition("example")[2]
    assert f"python -m {COMMANDS[name].function.partition(':')[0]}" not in shown.stdout


def test_mistakes_end_with_code_2_in_one_line(tmp_path: Path) -> None:
    kept = {"ANABRANCH_MEMORY": str(tmp_path / "network.json"), "ANABRANCH_PEERS": ""}
    for words in (("ask", "--prompt", "x"), ("status",), ("invite",), ("plan",), ("chat",)):
        done = ran(*words, **kept)
        assert done.returncode == 2, words
        (line,) = done.stderr.splitlines()
        assert line.startswith("error: which network?"), words


def test_forget_removes_what_is_remembered_and_says_so(tmp_path: Path) -> None:
    path = tmp_path / "network.json"
    kept = {"ANABRANCH_MEMORY": str(path)}
    assert ran("forget", **kept).stdout == "no network was remembered\n"
    path.write_text("damaged")
    done = ran("forget", **kept)
    assert (done.returncode, done.stdout) == (0, f"forgotten: {path} is removed\n")
    assert not path.exists()


def test_bash_completes_commands_and_options() -> None:
    script = ran("completion", "bash")
    assert script.returncode == 0
    asked = (
        '\ntell() { COMP_WORDS=(anabranch "$@"); COMP_CWORD=$#; _anabranch;'
        ' echo "${COMPREPLY[*]}"; }\n'
        "tell s; tell ask --prom; tell join --pow; tell ask models/;"
        " tell plan --gp; tell plan --q\n"
    )
    out = subprocess.run(
        ["bash", "-c", script.stdout + asked], capture_output=True, text=True, check=True
    ).stdout
    assert out.splitlines() == [
        "serve status simulate",
        "--prompt --prompt-ids --prompt-logprobs",
        "--power-limit",
        "",
        "--gpus",
        "--quantize",
    ]
    zsh = ran("completion", "zsh").stdout
    assert zsh == f"autoload -U +X bashcompinit && bashcompinit\n{script.stdout}"
    assert ran("completion", "fish").returncode == 2


def test_join_has_said_its_first_word_before_it_loads_torch(tmp_path: Path) -> None:
    code, names = imported_by("join", "--model", str(tmp_path / "none"))
    assert code == 2
    assert "node" in names
    assert not {"torch", "transformers"} & names


def test_the_package_gives_what_the_client_gives() -> None:
    assert set(anabranch.__all__) == set(client.__all__) <= set(dir(anabranch))
    for name in client.__all__:
        assert getattr(anabranch, name) is getattr(client, name)
    with pytest.raises(AttributeError, match="no attribute 'Swamp'"):
        anabranch.Swamp  # noqa: B018


def theirs(directory: Path, part: str) -> None:
    """A user's own module, with the name of a part."""
    (directory / f"{part}.py").write_text("WHOSE = 'theirs'\n")


@pytest.mark.parametrize("part", ["client", "dht"])
def test_a_module_of_ones_own_breaks_no_command_and_is_named(part: str, tmp_path: Path) -> None:
    theirs(tmp_path, part)
    done = subprocess.run(
        [sys.executable, "-m", "anabranch", "ask", "--help"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout[:20]) == (0, "usage: anabranch ask"), done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"note: {tmp_path / part}.py has the name of a part of Anabranch")


@pytest.mark.parametrize(
    ("program", "code", "said"),
    [
        ("from anabranch import Swarm; print(Swarm.__name__)", 0, "client.py has the name"),
        ("import client, anabranch", 1, "client.py was imported as client"),
        ("import client; print(client.WHOSE)", 0, ""),
    ],
)
def test_a_program_beside_a_client_of_ones_own_uses_ours_or_is_told(
    program: str, code: int, said: str, tmp_path: Path
) -> None:
    theirs(tmp_path, "client")
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert said in done.stderr.splitlines()[-1 if code else 0] if said else not done.stderr


def test_processes_that_others_start_find_their_own_modules_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A grammar is tried in a process of its own, here with other code beside it."""
    from dht.grammars.trials import GrammarTrials, TrialLimits

    theirs(tmp_path, "dht")
    monkeypatch.chdir(tmp_path)
    trials = GrammarTrials(TrialLimits(cpu_s=60.0, answer_s=60.0))
    assert not asyncio.run(trials.fault("somebody", b'start: "yes"'))


def test_an_interrupt_while_a_command_is_imported_is_no_fault(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("sys.argv", ["anabranch", "ask", "--prompt", "One"])
    monkeypatch.setattr("anabranch.commands.pkgutil.resolve_name", interrupted)
    assert commands.main() == EXIT_INTERRUPTED
    assert capsys.readouterr().err == ""
