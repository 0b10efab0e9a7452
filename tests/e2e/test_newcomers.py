"""Newcomers: they lend, ask and build with what is printed or written, and nothing else.

Each has a home without a file, and a network on which nobody serves yet; one swarm is shared by
all of them, in the order of the tests.
"""

import importlib.util
import re
import stat
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from node.peer.join_options import has_gpu
from node.peer.lent_before import LENT_BEFORE
from testing.documents import PAGES, imported, programs
from testing.newcomers import Newcomer, newcomers
from testing.terminal import CTRL_C, CTRL_D, Terminal

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(sys.platform == "win32", reason="no terminals of Unix"),
]
SMALL, LARGE = {"columns": 80, "lines": 24}, {"columns": 120, "lines": 40}
SERVING = r"^serving: layers 0-7 of 8"
LENT = ("--memory", "0.5", "--monthly-cap", "300")


@dataclass
class Walk:
    """The swarm that the newcomers make."""

    founder: Newcomer
    joiner: Newcomer
    founding: Terminal
    joining: Terminal
    join_line: str
    ask_line: str

    @property
    def invitation(self) -> str:
        found = re.search(r"anabranch:\S+", self.ask_line)
        assert found is not None
        return found[0]


def install(newcomer: Newcomer) -> None:
    """Put ``anabranch`` on the path, as an installation does."""
    script = newcomer.home / "bin" / "anabranch"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -m anabranch "$@"\n')
    script.chmod(script.stat().st_mode | stat.S_IXUSR)


@pytest.fixture(scope="module")
def walk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Walk]:
    """A founder by the one-liner of the README, and a second machine that pastes what it shows."""
    homes = tmp_path_factory.mktemp("homes")
    with newcomers(homes / "first", homes / "second") as (first, second):
        founding = first.terminal(
            "python", "-m", "node.join", "--cpu", *LENT, *first.alone, **SMALL
        )
        with founding:
            join_line = founding.wait_for(r"^(\S.* join anabranch:.*)$")[1]
            ask_line = founding.wait_for(r"^(\S.* ask anabranch:.*)$")[1]
            founding.wait_for(SERVING)
            with second.pasted(" ".join((join_line, *second.alone)), **LARGE) as joining:
                joining.wait_for(r"Go\? \[Y/n\]")
                joining.type("\n")
                joining.wait_for(SERVING)
                yield Walk(first, second, founding, joining, join_line, ask_line)


def fits(terminal: Terminal, *, pasted: int) -> None:
    """All lines but ``pasted`` ones fit the terminal; of those each is one line."""
    longer = [line for line in terminal.text.splitlines() if len(line) > terminal.columns]
    whole = [line for line in longer if " " in line]
    assert len(whole) == pasted, whole
    assert all("anabranch:" in line for line in whole)


def test_a_machine_without_a_gpu_is_told_so_in_a_line(tmp_path: Path) -> None:
    if has_gpu():
        pytest.skip("this machine has a GPU")
    (tmp_path / "bin").mkdir()
    newcomer = Newcomer(home=tmp_path)
    done = newcomer.ran("python", "-m", "node.join", "--gpu", "0")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: GPU 0")
    assert "--cpu" in line
    assert "No network is known" not in done.stdout, "nothing is begun before"


def test_who_lends_by_the_one_line_is_told_what_comes_next(walk: Walk) -> None:
    text = walk.founding.text
    for said in (
        "No network is known here, and no model was named.",
        "Founding a network with the bundled model",
        "brook is a toy, to see how it works. Next: a bigger model",
        f"/tcp/{LENT_BEFORE.port_default}",
    ):
        assert said in " ".join(text.split()) or said in text, text
    fits(walk.founding, pasted=2)


def test_the_second_machine_pastes_the_line_and_serves(walk: Walk) -> None:
    assert re.search(r"^Needed most by brook: layers 0-7 of 8,", walk.joining.text, re.MULTILINE)
    assert "network anabranch, model brook, by an invitation to" in walk.joining.text
    fits(walk.joining, pasted=2)


def test_who_asks_pastes_a_line_and_later_needs_none(walk: Walk, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    asker = replace(walk.joiner, home=tmp_path)
    install(asker)
    with asker.pasted(walk.ask_line, **SMALL) as first:
        assert first.wait() == 0
    assert re.search(r"^\d+ tokens after a prompt of \d+", first.text, re.MULTILINE), first.text
    again = asker.ran("anabranch", "ask", "--prompt", "Rain", "--max-new-tokens", "4")
    assert again.returncode == 0, again.stderr
    assert "network anabranch, remembered in" in again.stderr
    with asker.terminal("anabranch", "chat", "--max-new-tokens", "16", **LARGE) as chat:
        chat.wait_for(r"Ctrl-C\s+stops\s+an\s+answer\.")
        chat.type("One morning\n")
        chat.wait_for(r"^\d+ tokens after a prompt of \d+")
        chat.wait_for(r"^>\Z")  # before, the key would be the system's to understand
        chat.type(CTRL_D)
        assert chat.wait() == 0


def test_programs_of_the_documents_run_as_they_are_written(walk: Walk, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    builder = replace(walk.joiner, home=tmp_path)
    install(builder)
    found = [text for page in PAGES for text in programs(page)]
    runnable = [
        text.replace("anabranch:…", walk.invitation)
        for text in found
        if all(map(importlib.util.find_spec, imported(text)))  # some clients are not for tests
    ]
    with builder.terminal("anabranch", "serve", walk.invitation, **SMALL) as gateway:
        gateway.wait_for(r"serving .*http://127\.0\.0\.1:8000")
        for text in runnable:
            source = tmp_path / "program.py"
            source.write_text(text)
            done = builder.ran("python", "-c", f"import sys; exec(open({str(source)!r}).read())")
            assert done.returncode == 0, f"{text}\n{done.stderr}"
        gateway.type(CTRL_C)
        assert gateway.wait() == 0


def test_who_comes_back_has_the_port_and_lends_what_was_said(walk: Walk) -> None:
    walk.founding.type(CTRL_C)
    assert walk.founding.wait() == 0
    assert "Left the swarm." in walk.founding.text
    again = walk.founder.terminal(
        "python", "-m", "node.join", "--cpu", *walk.founder.alone, **LARGE
    )
    with again:
        again.wait_for(SERVING)
        as_last = again.wait_for(r"^As last time: 0\.5 GiB, 300 GB a month; change with .*$")
        assert "--memory" in as_last[0]
        assert f"/tcp/{LENT_BEFORE.port_default}" in again.text
        assert again.wait_for(r"^(\S.* ask anabranch:.*)$")
        again.type(CTRL_C)
        assert again.wait() == 0
