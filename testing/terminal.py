"""A command on a terminal of a given size, as a person has it: what it shows, and keys for it."""

import fcntl
import os
import re
import signal
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from testing.local_swarm import end_group

CONTROL = re.compile(
    r"\x1b\[([0-?]*)[ -/]*([@-~])"  # colours, and where the cursor goes
    r"|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)"  # titles
    r"|\x1b[@-Z\\-_=>]|([\r\n])|[\x00-\x08\x0b\x0c\x0e-\x1f]"
)
LIMIT_S = 600.0
"""Time for what a command is waited for: it comes in seconds on a machine that is not busy."""
CTRL_C, CTRL_D = "\x03", "\x04"


Cell = tuple[str, str]
"""A character, and how it is shown: the numbers of SGR, such as "1;36"; empty: as usual."""


def cells(written: str) -> list[list[Cell]]:
    """What is left on a terminal of what was ``written``: lines are erased, and written anew.

    Lines stay as long as they were written, as they do when somebody copies them.
    """
    lines: list[list[Cell]] = [[]]
    row, column, at, style = 0, 0, 0, ""

    def write(text: str) -> None:
        nonlocal column
        line = lines[row]
        line += [(" ", "")] * (column - len(line))
        line[column : column + len(text)] = [(character, style) for character in text]
        column += len(text)

    for found in CONTROL.finditer(written):
        write(written[at : found.start()])
        at = found.end()
        number, letter, end = found.groups()
        if end == "\r":
            column = 0
        elif end == "\n":
            row += 1
            if row == len(lines):
                lines.append([])
        elif letter == "m":
            style = "" if number in {"", "0"} else number
        elif letter == "A":
            row = max(0, row - int(number or 1))
        elif letter == "K":
            lines[row] = [] if number == "2" else lines[row][:column]
        elif letter == "J":
            lines[row], lines[row + 1 :] = lines[row][:column], []
    write(written[at:])
    return lines


def shown(written: str) -> str:
    """The text of :func:`cells`, without blanks at the ends of lines."""
    return "\n".join("".join(text for text, _ in line).rstrip() for line in cells(written))


class Terminal:
    """A command in a session of its own, whose terminal this is; use as a context manager."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        directory: Path,
        columns: int,
        lines: int,
    ) -> None:
        self.columns, self.lines = columns, lines
        self._master, slave = os.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.process = subprocess.Popen(
            ["setsid", "--ctty", *command],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            cwd=directory,
            env={"TERM": "xterm-256color", **environment},
        )
        os.close(slave)
        self._data, self._ended = b"", False
        self._arrivals: list[tuple[float, int]] = []
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def text(self) -> str:
        """What was shown so far and was not erased."""
        return shown(self._data.decode(errors="replace"))

    def history(self) -> list[tuple[float, str]]:
        """All that was written by each time at which something was, by the monotonic clock."""
        with self._news:
            data, arrivals = self._data, list(self._arrivals)
        return [(time_s, data[:upto].decode(errors="ignore")) for time_s, upto in arrivals]

    def _read(self) -> None:
        """Take what is written, as terminals do: who writes to a full one waits."""
        while True:
            try:
                data = os.read(self._master, 1 << 16)
            except OSError:  # the last process that had the terminal has ended
                data = b""
            with self._news:
                self._data += data
                self._arrivals.append((time.monotonic(), len(self._data)))
                self._ended = not data
                self._news.notify_all()
            if not data:
                return

    def wait_for(self, pattern: str, *, limit_s: float | None = None) -> re.Match[str]:
        """Where ``pattern`` is in :attr:`text`, once it is there.

        Raises AssertionError, with what was shown, where the command ends or time runs out before.
        """
        until_s, searched = time.monotonic() + (limit_s or LIMIT_S), re.compile(pattern, re.M)
        with self._news:
            while (found := searched.search(self.text)) is None:
                if self._ended or time.monotonic() > until_s:
                    raise AssertionError(f"no {pattern!r} in:\n{self.text[-4000:]}")
                self._news.wait(1.0)
        return found

    def type(self, keys: str) -> None:
        """Press keys; a line ends with ``\\n``."""
        os.write(self._master, keys.encode())

    def wait(self, limit_s: float | None = None) -> int:
        """The exit code, once the command has ended. Raises AssertionError where it does not."""
        try:
            return self.process.wait(limit_s or LIMIT_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it does not end:\n{self.text[-4000:]}") from None
        finally:
            self._reader.join(1.0)  # what was written last is shown

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.wait(20.0)
            except AssertionError:
                end_group(self.process.pid)
                self.process.wait()
        self._reader.join()
        os.close(self._master)
