"""What a peer's owner is told while it serves and when it leaves, and what is kept of it."""

import asyncio
import io
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console, RenderableType

from dht.messages.types import NodeState
from node.owner.contribution import Contribution, load, save
from node.owner.contribution_watch import ContributionWatch
from node.owner.live_panel import Figures
from node.owner.reporter import Reporter
from testing.clock import run_virtual
from tests.unit.node.owner.terminal import Terminal

BEFORE = Contribution(tokens=1000, sessions=10, serving_s=3600.0)
START = Figures(
    state=NodeState.LOADING,
    start=0,
    end=4,
    layers=8,
    sessions=0,
    tokens=0,
    up_bytes=0,
    down_bytes=0,
    peers=0,
)
SERVING = replace(START, state=NodeState.SERVING)


class Peer:
    """A peer whose figures a test sets."""

    def __init__(self, path: Path, reporter: Reporter) -> None:
        self.figures, self.helped = START, 0
        self.watch = ContributionWatch(
            lambda: self.figures,
            lambda shown: shown,
            lambda: self.helped,
            reporter,
            path,
            lambda: (None, None),
        )

    async def serve(self) -> None:
        """Load for 20 s, serve for 150 s, then leave between two looks."""
        running = asyncio.create_task(self.watch.run())
        await asyncio.sleep(20.5)
        self.figures = replace(SERVING, tokens=40, sessions=1)
        await asyncio.sleep(150)
        self.figures, self.helped = replace(SERVING, tokens=77), 3
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running


def test_who_leaves_is_told_what_was_lent_this_time_and_all_of_it_is_kept(tmp_path: Path) -> None:
    path, out = tmp_path / "peer.contribution.json", io.StringIO()
    save(path, BEFORE)
    run_virtual(Peer(path, Reporter(json_log=False, out=out)).serve(), limit_s=600)
    said = out.getvalue().splitlines()
    assert said[-1] == "Lent this time: 77 tokens in 3 answers, 2 min of serving. Thank you."
    assert load(path) == Contribution(tokens=1077, sessions=13, serving_s=3600.0 + 150.0)
    assert "loading" not in said[-1], "while it loads it serves nobody"
    run_virtual(Peer(path, Reporter(json_log=False, out=out)).serve(), limit_s=600)
    assert load(path) == Contribution(tokens=1154, sessions=16, serving_s=3600.0 + 300.0)


@pytest.mark.virtual(limit_s=600)
async def test_what_was_lent_is_kept_now_and_then(tmp_path: Path) -> None:
    """A peer that is killed loses a minute of it."""
    path = tmp_path / "peer.contribution.json"

    peer = Peer(path, Reporter(json_log=False, out=io.StringIO()))
    running = asyncio.create_task(peer.watch.run())
    peer.figures, peer.helped = replace(SERVING, tokens=5), 1
    await asyncio.sleep(59)
    assert not path.exists()
    await asyncio.sleep(2)
    assert load(path) == Contribution(tokens=5, sessions=1, serving_s=60.0)
    running.cancel()


def test_the_panel_is_gone_when_the_totals_are_told(tmp_path: Path) -> None:
    terminal = Terminal(80, 24)
    reporter = Reporter(json_log=False, out=terminal)
    reporter._console = Console(
        file=terminal, force_terminal=True, width=80, height=24, soft_wrap=True
    )
    path = tmp_path / "peer.contribution.json"
    save(path, BEFORE)
    run_virtual(Peer(path, reporter).serve(), limit_s=600)
    assert terminal.lines() == [
        "Lent this time: 77 tokens in 3 answers, 2 min of serving. Thank you."
    ]
    assert "1040 tokens in 10 answers" in terminal.getvalue(), "the panel told all since ever"


class Log(Reporter):
    """Writes a line at every tenth look, as one without a terminal does every five minutes."""

    looks = 0

    def show(self, view: Callable[[], RenderableType], line: Callable[[], str]) -> None:
        self.looks += 1
        if self.looks % 10 == 0:
            self.say(line())


@pytest.mark.virtual(limit_s=600)
async def test_a_line_in_a_log_tells_the_mean_rate_since_the_one_before(tmp_path: Path) -> None:
    """Nobody asks at the moment of the second line, and much was served before it."""
    out = io.StringIO()
    peer = Peer(tmp_path / "peer.contribution.json", Log(json_log=False, out=out))
    running = asyncio.create_task(peer.watch.run())
    await asyncio.sleep(20.5)
    peer.figures = replace(SERVING, tokens=50)
    await asyncio.sleep(30)
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running
    rates = [re.findall(r"([0-9.]+) tokens/s", each) for each in out.getvalue().splitlines()]
    assert rates == [["0.0"], ["2.5"], []], "50 tokens in 20 s; the last line is the farewell"
