"""This project's commands as processes that need not import anything first.

Before ``python -m node.join`` does anything it takes more than four seconds of CPU time to import
torch, transformers and hivemind: three quarters of what a peer of the bundled model costs. Here
one process per starter imports them and does nothing else; each command is forked from it, and
runs from its first line with arguments, environment, folder and files of its own, in a network
namespace of :mod:`testing.wan_lab` where that is asked for.
"""

import atexit
import contextlib
import importlib
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from multiprocessing import connection
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

from testing import wan_lab
from testing.local_swarm import Process, end_group, spawned
from testing.paths import ROOT

FORKS = "forkserver" in multiprocessing.get_all_start_methods()
"""Not on Windows: commands are started as users start them there."""
CONTEXT: Any = multiprocessing.get_context("forkserver" if FORKS else None)
if FORKS:
    CONTEXT.set_forkserver_preload(["testing.imported_first"])
STARTING = threading.Lock()
"""multiprocessing looks after its children whenever one is started, in whichever thread."""


NO_INTERVALS: Mapping[str, float] = {}
NOTHING_MORE: Mapping[str, str] = {}


class ForkedProcess:
    """The part of ``subprocess.Popen`` that is used of a peer."""

    def __init__(
        self,
        arguments: Sequence[str],
        out: int,
        error: int,
        namespace: str = "",
        intervals: Mapping[str, float] = NO_INTERVALS,
        environment: Mapping[str, str] = NOTHING_MORE,
        folder: Path = ROOT,
    ) -> None:
        """Run ``python -m`` with these arguments in ``folder``; its output goes to these open
        files.

        ``namespace`` is the network namespace that it runs in; "": this process's own.
        ``environment`` adds to this process's own what nothing reads when it is imported.
        ``intervals`` are shorter ones than its parts have by default, in seconds, by
        ``module:Class.parameter`` or ``module:CONFIG.field``.
        """
        from node.join import SPINS  # a command, which the new process must not find imported

        # Read when torch is loaded; node.join sees to it where it loads torch itself.
        os.environ.setdefault("GOMP_SPINCOUNT", str(SPINS))
        files = DupFd(out), DupFd(error)
        whole = {**os.environ, **environment}
        given = (list(arguments), whole, *files, namespace, dict(intervals), str(folder))
        with STARTING:
            self._process = CONTEXT.Process(target=_run, args=given, daemon=True)
            self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code, or the negative number of the signal that ended it; None: it runs."""
        return self.poll()

    def poll(self) -> int | None:
        with STARTING:
            return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""
        connection.wait([self._process.sentinel], timeout)
        ended = self.poll()
        if ended is None:
            raise subprocess.TimeoutExpired(str(self._process), timeout or 0.0)
        return ended

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _run(
    arguments: list[str],
    environment: dict[str, str],
    out: Any,
    error: Any,
    namespace: str,
    intervals: dict[str, float],
    folder: str,
) -> None:
    """In the new process: what ``python -m`` would do with these arguments."""
    os.setsid()
    for number, file in ((1, out), (2, error)):
        opened = file.detach()
        os.dup2(opened, number)
        os.close(opened)
    assert "testing.imported_first" in sys.modules, "forked without what was to be imported"
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = arguments
    for name, seconds in intervals.items():
        _shorten(name, seconds)
    with wan_lab.inside(namespace) if namespace else contextlib.nullcontext():
        try:
            runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
        finally:
            atexit._run_exitfuncs()  # multiprocessing ends its processes without


def _shorten(name: str, seconds: float) -> None:
    """Give a class's constructor another default, or a configuration another value."""
    module, _, parameter = name.partition(":")
    owner, _, parameter = parameter.partition(".")
    found = getattr(importlib.import_module(module), owner)
    if isinstance(found, type):
        assert seconds < found.__init__.__kwdefaults__[parameter], name
        found.__init__.__kwdefaults__[parameter] = seconds
    else:
        assert seconds < getattr(found, parameter), name
        object.__setattr__(found, parameter, seconds)


def forked(
    command: Sequence[str],
    environment: Mapping[str, str],
    log: int,
    intervals: Mapping[str, float] = NO_INTERVALS,
) -> Process:
    """A peer by fork, also in a network namespace, unless it is to run elsewhere or with an
    environment of its own; ``intervals`` are those of `ForkedProcess`."""
    words, namespace = list(command), ""
    if words[: len(wan_lab.INSIDE)] == [*wan_lab.INSIDE]:
        namespace, *words = words[len(wan_lab.INSIDE) :]
    if not FORKS or words[:2] != [sys.executable, "-m"] or environment:
        return spawned(command, environment, log)
    return ForkedProcess(words[2:], log, log, namespace, intervals)


def run(
    *arguments: str,
    limit_s: float | None = None,
    namespace: str = "",
    environment: Mapping[str, str] = NOTHING_MORE,
    folder: Path = ROOT,
) -> subprocess.CompletedProcess[str]:
    """``python -m`` with these arguments, to its end, and what it wrote.

    It runs in ``folder``, in the network namespace ``namespace``, if there is one, and with an
    ``environment`` as in `ForkedProcess`. Raises subprocess.TimeoutExpired once it ran for
    ``limit_s``, and ends it.
    """
    if not FORKS:
        command = [sys.executable, "-m", *arguments]
        return subprocess.run(
            command,
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=limit_s,
            env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        )
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as error:
        files = out.fileno(), error.fileno()
        process = ForkedProcess(
            arguments, *files, namespace, environment=environment, folder=folder
        )
        try:
            ended = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            end_group(process.pid)
            raise
        out.seek(0)
        error.seek(0)
        return subprocess.CompletedProcess(arguments, ended, out.read(), error.read())
