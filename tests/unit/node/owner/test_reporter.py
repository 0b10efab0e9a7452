"""What a joining peer tells about a transfer."""

import io
import json

import pytest
from rich.console import Console

from node.owner import reporter
from node.owner.reporter import Reporter, TransferRate, progress_sentence

MIB = 1 << 20


def test_the_rate_does_not_count_what_an_earlier_attempt_brought() -> None:
    pace = TransferRate(start_bytes=900 * MIB, start_s=10.0)
    assert pace.bytes_per_s(900 * MIB, 10.0) == 0.0
    assert pace.bytes_per_s(950 * MIB, 15.0) == 10 * MIB


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
                meter.update(step * 10 * MIB, 100 * MIB)
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
