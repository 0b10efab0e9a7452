"""What a joining peer tells its owner: a terminal view, plain lines, or JSON events."""

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from dht.types import NodeState


class Meter(Protocol):
    """Progress of one phase."""

    def update(self, done_bytes: int, total_bytes: int) -> None: ...


class Reporter:
    """Writes events as JSON objects, one a line, to stderr, or as sentences to stdout.

    On a terminal, phases show a spinner or a bar; elsewhere each phase is one plain line at its
    start. The events' names and fields are a contract: see docs/protocol.md.
    """

    def __init__(self, *, json_log: bool, out: TextIO = sys.stdout, log: TextIO = sys.stderr):
        self._json_log = json_log
        self._log = log
        self._console = Console(file=out, highlight=False, soft_wrap=True)

    def event(self, event: str, **fields: Any) -> None:
        """One event for machines; nothing is written without ``--json-log``."""
        if self._json_log:
            line = {"event": event, "unix_s": round(time.time(), 3), **fields}
            self._log.write(json.dumps(line, ensure_ascii=False) + "\n")
            self._log.flush()

    def say(self, text: str) -> None:
        """One line for people."""
        if not self._json_log:
            self._console.print(text, markup=False)

    @contextmanager
    def phase(self, text: str, *, counted: bool = False) -> Iterator[Meter]:
        """A phase that takes time; a ``counted`` one shows the bytes that its meter is fed with."""
        if self._json_log or not self._console.is_terminal:
            self.say(f"{text} …")
            yield _NoMeter()
            return
        columns = (BarColumn(bar_width=24), DownloadColumn(binary_units=True)) if counted else ()
        progress = Progress(
            SpinnerColumn(finished_text="✓"),
            TextColumn("{task.description}"),
            *columns,
            TimeElapsedColumn(),
            console=self._console,
        )
        with progress:
            task = progress.add_task(text, total=None)

            class _Bar:
                def update(self, done_bytes: int, total_bytes: int) -> None:
                    progress.update(task, completed=done_bytes, total=total_bytes)

            yield _Bar()
            done = progress.tasks[0].completed or 1
            progress.update(task, total=done, completed=done)


class _NoMeter:
    def update(self, done_bytes: int, total_bytes: int) -> None:
        """Plain output has no bars."""


def gibibytes(size_bytes: float) -> str:
    """A size as people read it."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size_bytes >= scale:
            return f"{size_bytes / scale:.1f} {unit}"
    return f"{size_bytes:.0f} B"


def layers_sentence(start: int, end: int, total: int, state: NodeState) -> str:
    """What this peer holds, in words."""
    if start == end:
        return f"{state}: no layers yet"
    return f"{state}: layers {start} to {end - 1} of {total}"
