"""What a joining peer tells about a transfer."""

import io
import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from rich.console import Console
from rich.panel import Panel

from dht.process.terminal import StderrHandler
from node.owner import reporter
from node.owner.reporter import Reporter, TransferRate, progress_sentence
from tests.unit.node.owner.terminal import Terminal

MIB = 1 << 20


def test_the_rate_does_not_count_what_an_earlier_attempt_brought() -> None:
    pace = TransferRate(start_bytes=900 * MIB, start_s=10.0)
    assert pace.bytes_per_s(900 * MIB, 10.0) == 0.0
    assert pace.bytes_per_s(950 * MIB, 15.0) == 10 * MIB


def test_the_rate_is_that_of_now_after_a_pause() -> None:
    pace = TransferRate(start_bytes=0, start_s=0.0)
    assert pace.bytes_per_s(100 * MIB, 10.0) == 10 * MIB
    at_s = 4000.0  # an hour without a byte
    for step in range(20):
        rate = pace.bytes_per_s((100 + 20 * step) * MIB, at_s + 5 * step)
    assert rate == 4 * MIB


def test_a_night_of_fetching_is_a_few_hundred_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(reporter.time, "monotonic", lambda: now_s)
    out = io.StringIO()
    with Reporter(json_log=False, out=out).phase("Fetching", counted=True) as meter:
        for step in range(12 * 3600):
            now_s += 1.0
            meter(step * MIB, 12 * 3600 * MIB)
    lines = out.getvalue().splitlines()
    assert 100 < len(lines) < 300
    assert "1.0 MiB/s" in lines[-1]


@pytest.mark.parametrize(
    ("rate", "text"),
    [
        (0.0, "512.0 MiB of 1.0 GiB"),
        (8.0 * MIB, "512.0 MiB of 1.0 GiB, 8.0 MiB/s, 1:04 left"),
    ],
)
def test_progress_says_how_much_how_fast_and_how_long(rate: float, text: str) -> None:
    assert progress_sentence(512 * MIB, 1024 * MIB, rate) == text


def test_plain_output_and_events_say_now_and_then_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 100.0
    monkeypatch.setattr(reporter.time, "monotonic", lambda: now_s)
    out, log = io.StringIO(), io.StringIO()
    for json_log in (False, True):
        with Reporter(json_log=json_log, out=out, log=log).phase("Fetching", counted=True) as meter:
            for step in range(4):
                now_s += 2.0
                meter(step * 10 * MIB, 100 * MIB)
    assert out.getvalue().splitlines() == [
        "Fetching …",
        "  20.0 MiB of 100.0 MiB, 5.0 MiB/s, 0:16 left",
    ]
    event = json.loads(log.getvalue())
    assert event["event"] == "progress"
    assert (event["done_bytes"], event["bytes_per_s"]) == (20 * MIB, 5 * MIB)


def test_a_terminal_gets_words_whole_and_no_bar_of_nothing() -> None:
    screen = io.StringIO()
    terminal = Reporter(json_log=False, out=screen)
    terminal._console = Console(file=screen, force_terminal=True, width=24, soft_wrap=True)
    invitation = "anabranch:" + 40 * "x"
    terminal.say(f"To let others join here: {invitation} is all")
    assert [line.strip() for line in screen.getvalue().splitlines()] == [
        "To let others join here:",
        invitation,
        "is all",
    ]
    with terminal.phase("Reading", counted=True):
        pass
    assert "bytes" not in screen.getvalue()
    assert "1/1" not in screen.getvalue()


INVITATION = "anabranch:" + 190 * "x"


@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 40), (24, 10)])
def test_what_is_to_be_copied_is_one_unbroken_line(width: int, height: int) -> None:
    screen = io.StringIO()
    terminal = Reporter(json_log=False, out=screen)
    terminal._console = Console(
        file=screen, force_terminal=True, width=width, height=height, soft_wrap=True
    )
    terminal.say("Invite others:")
    terminal.paste(f".venv/bin/python -m anabranch join {INVITATION} --model FILES")
    terminal.say("Anyone asks with:")
    assert screen.getvalue().splitlines()[1:2] == [
        f".venv/bin/python -m anabranch join {INVITATION} --model FILES"
    ]


@pytest.mark.parametrize(("width", "height", "shown"), [(80, 24, False), (120, 60, True)])
def test_a_code_to_scan_is_shown_where_it_fits(width: int, height: int, *, shown: bool) -> None:
    pytest.importorskip("segno")
    screen = io.StringIO()
    terminal = Reporter(json_log=False, out=screen)
    terminal._console = Console(
        file=screen, force_terminal=True, width=width, height=height, soft_wrap=True
    )
    terminal.picture(INVITATION)
    assert ("▀" in screen.getvalue() or "█" in screen.getvalue()) == shown
    assert all(len(line) < height for line in [screen.getvalue().splitlines()])


def on(terminal: Terminal) -> Reporter:
    """A reporter that writes to this terminal."""
    made = Reporter(json_log=False, out=terminal)
    made._console = Console(
        file=terminal,
        force_terminal=True,
        width=terminal.width,
        height=terminal.height,
        highlight=False,
        soft_wrap=True,
    )
    return made


@contextmanager
def logged() -> Iterator[logging.Logger]:
    """A logger that logs as commands do, with the stderr that is there when the command starts."""
    log, handler = logging.getLogger("test.panel"), StderrHandler()
    log.addHandler(handler)
    log.propagate = False
    try:
        yield log
    finally:
        log.removeHandler(handler)
        log.propagate = True


def test_what_is_logged_beside_the_panel_tears_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal(width=40, height=12)
    monkeypatch.setattr(sys, "stderr", terminal)
    box = ["╭" + "─" * 38 + "╮", "│ a" + " " * 36 + "│", "│ b" + " " * 36 + "│"]
    box.append("╰" + "─" * 38 + "╯")
    with logged() as log:
        owner = on(terminal)
        for number in range(3):
            owner.show(lambda: Panel("a\nb"), lambda: "")
            log.warning("lost %s: [red]no answer[/red]", number)
        said = [f"WARNING test.panel: lost {n}: [red]no answer[/red]" for n in range(3)]
        wrapped = [line for each in said for line in (each[:40].rstrip(), each[40:])]
        assert terminal.lines() == [*wrapped, *box], "the panel is whole, below what was logged"
        log.warning("a line that the terminal has to wrap, as it is longer than the terminal")
        owner.hide()
        log.warning("without a panel")
    lines = terminal.lines()
    assert not set("".join(lines)) & set("╭╮╰╯│─"), "nothing of it stays"
    assert lines[-1] == "WARNING test.panel: without a panel"


def test_what_is_logged_goes_to_a_file_where_stderr_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, file = Terminal(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", file)
    with logged() as log:
        owner = on(terminal)
        owner.show(lambda: Panel("a"), lambda: "")
        log.warning("beside the panel")
        owner.hide()
        with owner.phase("Loading"):
            log.warning("beside a bar")
    assert file.getvalue().splitlines() == [
        "WARNING test.panel: beside the panel",
        "WARNING test.panel: beside a bar",
    ]
    assert "beside" not in terminal.getvalue()
