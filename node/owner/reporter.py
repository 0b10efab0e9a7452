"""Reports a joining peer's progress to its owner: a terminal view, plain lines, or JSON events."""

import importlib
import io
import json
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TextIO

from rich import progress
from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress import (
    BarColumn,
    DownloadColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.text import Text

from dht.messages.types import NodeState, layers_text
from dht.process.lasting_stream import LastingStream
from dht.process.news import News
from dht.process.terminal import cut_between_words, printable


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportConfig:
    """How often, and how widely, the owner is told."""

    status_every_s: float = 300.0
    """Interval between status lines if there is no terminal."""
    line_every_s: float = 5.0
    """Interval between lines about one phase if there is no terminal, at first."""
    line_share: float = 0.05
    """Share of a phase's time so far that passes between two lines, up to ``status_every_s``: a
    night of fetching is two hundred lines."""
    rate_over_s: float = 60.0
    """Time over which a rate is measured: a pause before is over."""
    qr_leaves_lines: int = 16
    """Lines of a terminal that a QR code leaves for what is said beside it."""
    narrow: int = 100
    """Columns of a terminal up to which a bar is short and says no rate."""


REPORT = ReportConfig()

Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all."""


class Reporter:
    """Writes events as JSON objects, one per line, to stderr, or sentences to stdout.

    On a terminal, phases show a spinner or a bar; otherwise each phase is one plain line at its
    start. The events' names and fields are a contract: see docs/protocol.md.
    """

    def __init__(self, *, json_log: bool, out: TextIO = sys.stdout, log: TextIO = sys.stderr):
        self._json_log = json_log
        self._log = LastingStream(log)
        lasting: Any = LastingStream(out)
        self._console = Console(file=lasting, highlight=False, soft_wrap=True)
        self._live: Live | None = None
        self._phases = 0
        self._told_s = time.monotonic()
        self._standing: dict[str, News] = {}

    def event(self, event: str, **fields: Any) -> None:
        """Write one event for machines; only with ``--json-log``."""
        if self._json_log:
            line = {"event": event, "unix_s": round(time.time(), 3), **fields}
            self._log.write(json.dumps(line, ensure_ascii=False) + "\n")
            self._log.flush()

    def say(self, text: str) -> None:
        """Write one line for people. A terminal gets it cut between words; longer words stay whole,
        so that they can be copied."""
        if self._json_log:
            return
        text = printable(text)
        if self._console.is_terminal:
            text = cut_between_words(text, self._console.width)
        self._console.print(text, markup=False)

    def paste(self, line: str) -> None:
        """Write a line to be copied: whole, on a line of its own, however narrow the terminal."""
        if not self._json_log:
            self._console.print(printable(line), markup=False, no_wrap=True, crop=False)

    def picture(self, text: str) -> None:
        """Show ``text`` as a QR code, on a terminal that has room for it, where segno is there."""
        if self._json_log or not self._console.is_terminal:
            return
        try:
            segno = importlib.import_module("segno")
        except ImportError:
            return
        drawn = io.StringIO()
        code = segno.make(text, micro=False, error="l")
        code.terminal(drawn, compact=True)
        lines = drawn.getvalue().rstrip("\n").split("\n")
        columns, _ = code.symbol_size()
        if (
            columns <= self._console.width
            and len(lines) + REPORT.qr_leaves_lines <= self._console.height
        ):
            for line in lines:
                self._console.print(Text.from_ansi(line), no_wrap=True, crop=False)

    def stands(self, topic: str, text: str) -> bool:
        """Write a line about how it stands with ``topic``, once and when it changes; an empty one
        ends that. Returns whether it was news."""
        news = self._standing.setdefault(topic, News())
        if not text:
            news.forget()
            return False
        told = news.takes(text, time.monotonic())
        if told:
            self.say(text)
        return told

    def show(self, view: Callable[[], RenderableType], line: Callable[[], str]) -> None:
        """Show the present figures: ``view`` at the end of a terminal, while no phase runs; without
        a terminal, ``line`` every ``REPORT.status_every_s``. Only the one that is shown is
        computed."""
        if not self._json_log and self._console.is_terminal:
            if self._phases:
                return
            if self._live is None:
                self._live = Live(
                    console=self._console,
                    auto_refresh=False,
                    transient=True,
                    vertical_overflow="crop",
                    redirect_stderr=sys.stderr.isatty(),  # a file gets what is logged
                )
                self._live.start()
            self._live.update(view(), refresh=True)
        elif time.monotonic() - self._told_s >= REPORT.status_every_s:
            self._told_s = time.monotonic()
            self.say(line())

    def hide(self) -> None:
        """Remove the live view."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    @contextmanager
    def phase(self, text: str, *, counted: bool = False) -> Iterator[Progress]:
        """Run a phase that takes time. If ``counted``, a bar shows bytes done and in total, the
        rate, and the time left, from calls of what is yielded."""
        if self._json_log or not self._console.is_terminal:
            self.say(f"{text} …")
            yield self._lines(text)
            return
        self.hide()
        self._phases += 1
        try:
            with self._bar(text, counted=counted) as meter:
                yield meter
        finally:
            self._phases -= 1

    @contextmanager
    def _bar(self, text: str, *, counted: bool) -> Iterator[Progress]:
        plain = (
            SpinnerColumn(finished_text="✓"),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
        )
        to_terminal = sys.stderr.isatty()
        bar = progress.Progress(*plain, console=self._console, redirect_stderr=to_terminal)
        meter = (
            BarColumn(bar_width=24 if self._console.width > REPORT.narrow else 8),
            DownloadColumn(binary_units=True),
            *((TransferSpeedColumn(),) if self._console.width > REPORT.narrow else ()),
            TimeRemainingColumn(),
        )
        with bar:
            task = bar.add_task(text, total=None)

            def show(done_bytes: int, total_bytes: int) -> None:
                if counted:  # a phase that had nothing to do shows no bar of nothing
                    bar.columns = (*plain[:2], *meter)
                bar.update(task, completed=done_bytes, total=total_bytes)

            yield show
            bar.columns = plain
            done = bar.tasks[0].completed or 1
            bar.update(task, total=done, completed=done)

    def _lines(self, text: str) -> Progress:
        """Writes a line and an event every ``REPORT.line_every_s``, none for short phases."""
        said_s = time.monotonic()
        rate: TransferRate | None = None

        def tell(done_bytes: int, total_bytes: int) -> None:
            nonlocal said_s, rate
            now_s = time.monotonic()
            rate = rate or TransferRate(start_bytes=done_bytes, start_s=now_s)
            share_s = REPORT.line_share * (now_s - rate.start_s)
            every_s = max(REPORT.line_every_s, min(share_s, REPORT.status_every_s))
            if now_s - said_s < every_s:
                return
            said_s = now_s
            per_s = rate.bytes_per_s(done_bytes, now_s)
            self.say(f"  {progress_sentence(done_bytes, total_bytes, per_s)}")
            self.event(
                "progress",
                phase=text,
                done_bytes=done_bytes,
                total_bytes=total_bytes,
                bytes_per_s=round(per_s),
            )

        return tell


class TransferRate:
    """Measures a transfer's rate, not counting bytes from an earlier attempt."""

    def __init__(self, *, start_bytes: int, start_s: float) -> None:
        self.start_s = start_s
        self._seen = deque([(start_s, start_bytes)])

    def bytes_per_s(self, done_bytes: int, now_s: float) -> float:
        """Mean rate since a call ``REPORT.rate_over_s`` ago, or since the start; 0 if nothing has
        come in that time."""
        self._seen.append((now_s, done_bytes))
        while now_s - self._seen[1][0] >= REPORT.rate_over_s:
            self._seen.popleft()
        then_s, then_bytes = self._seen[0]
        passed_s = now_s - then_s
        return max(0.0, (done_bytes - then_bytes) / passed_s) if passed_s > 0 else 0.0


def progress_sentence(done_bytes: int, total_bytes: int, bytes_per_s: float) -> str:
    text = f"{gibibytes(done_bytes)} of {gibibytes(total_bytes)}"
    if bytes_per_s <= 0:
        return text
    left_s = round((total_bytes - done_bytes) / bytes_per_s)
    return f"{text}, {gibibytes(bytes_per_s)}/s, {left_s // 60}:{left_s % 60:02} left"


def gibibytes(size_bytes: float) -> str:
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size_bytes >= scale:
            return f"{size_bytes / scale:.1f} {unit}"
    return f"{size_bytes:.0f} B"


def counted(number: int, noun: str) -> str:
    """``1 session``, ``2 sessions``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def layers_sentence(start: int, end: int, total: int, state: NodeState) -> str:
    """The layers that this peer holds, in words."""
    if start == end:
        return f"{state}: no layers yet"
    return f"{state}: {layers_text((start, end))} of {total}"
