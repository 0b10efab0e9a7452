"""A program on a terminal of its own, and somebody who types."""

import codecs
import os
import select
import subprocess
import sys

import pytest

from testing.paths import ROOT

pty = pytest.importorskip("pty")
SAID_S = 60.0


class Terminal:
    """A Python program on a terminal; use as a context manager."""

    def __init__(self, program: str, *arguments: str, term: str = "dumb") -> None:
        self._ours, theirs = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, *arguments],
            cwd=ROOT,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            env={**os.environ, "TERM": term},
        )
        os.close(theirs)
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self.shown = ""

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def until(self, text: str) -> str:
        """What is shown up to and with ``text``, since the last look."""
        while text not in self.shown:
            ready, _, _ = select.select([self._ours], [], [], SAID_S)
            assert ready, f"{text!r} never came after {self.shown!r}"
            came = self._decoder.decode(os.read(self._ours, 4096))
            self.shown = f"{self.shown}{came}".replace("\r\n", "\n")
        before, _, self.shown = self.shown.partition(text)
        return before + text
