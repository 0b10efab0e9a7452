"""Starts and ends real peer processes on this machine, for the demo, tests and benchmarks.

Every peer runs ``python -m node.join --json-log`` in a process group of its own, so that ending
the group ends whatever the peer started. All waits are for events in the peers' logs.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from testing.paths import ROOT

os.environ.setdefault("ANABRANCH_MEMORY", "")  # a swarm for a while is nobody's usual network
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else each start compiles every module again


class PeerStartError(RuntimeError):
    """A peer ended, or did not reach an event in time; the message holds the end of its log."""


class Process(Protocol):
    """The part of ``subprocess.Popen`` that is used of a peer."""

    pid: int

    @property
    def returncode(self) -> int | None: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def send_signal(self, sig: int, /) -> None: ...

    def kill(self) -> None: ...


Start = Callable[[Sequence[str], Mapping[str, str], int], Process]
"""Starts a process as :func:`spawned` does."""


def spawned(command: Sequence[str], environment: Mapping[str, str], log: int) -> Process:
    """Start a command in a process group of its own.

    ``environment`` adds to this process's own; ``log`` is an open file for all that it says.
    """
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        cwd=ROOT,
        env={**os.environ, **environment},
        start_new_session=True,
    )


@dataclass(slots=True)
class LocalPeer:
    """One peer process and the events it wrote."""

    name: str
    process: Process
    log: Path
    host: str = "127.0.0.1"
    events: list[dict[str, Any]] = field(default_factory=list)
    _offset: int = 0

    def read_events(self) -> list[dict[str, Any]]:
        """All events so far; other lines of the log are skipped."""
        with self.log.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        complete = data.rfind(b"\n") + 1
        self._offset += complete
        for line in data[:complete].splitlines():
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if isinstance(event, dict) and "event" in event:
                self.events.append(event)
        return self.events

    def find(self, event: str) -> dict[str, Any] | None:
        """The newest event of that name."""
        return next((e for e in reversed(self.read_events()) if e["event"] == event), None)

    def wait_for(self, event: str, limit_s: float = 120.0, since: int = 0) -> dict[str, Any]:
        """The first event of that name at index ``since`` or later; waits for it.

        Raises PeerStartError when the process ends or ``limit_s`` passes before.
        """
        until_s = time.monotonic() + limit_s
        while True:
            for found in self.read_events()[since:]:
                if found["event"] == event:
                    return found
            if self.process.poll() is not None:
                raise PeerStartError(
                    f"{self.name} ended with {self.process.returncode}: {self.tail()}"
                )
            if time.monotonic() > until_s:
                raise PeerStartError(f"{self.name}: no {event!r} in {limit_s} s: {self.tail()}")
            time.sleep(0.02)

    def tail(self) -> str:
        """The end of the log."""
        return self.log.read_text(errors="replace")[-2000:]

    @property
    def address(self) -> str:
        """A multiaddress of this peer on the host that it was started on."""
        addresses = self.wait_for("listening")["addresses"]
        return str(next(a for a in addresses if f"/{self.host}/" in a))

    @property
    def peer_id(self) -> str:
        return str(self.wait_for("listening")["peer_id"])

    def kill(self) -> None:
        """SIGKILL to the peer's own process, as a crash would end it; its children remain."""
        self.process.kill()
        self.process.wait()

    def signal(self, number: int) -> None:
        """Send a signal to the peer's own process."""
        self.process.send_signal(number)

    def stop(self, limit_s: float = 20.0) -> int:
        """Ask the peer to leave, and end its whole group if it does not; returns its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(limit_s)
        end_group(self.process.pid)
        return self.process.wait()


def end_group(group: int) -> None:
    """SIGKILL to everything in a process group, which may be gone already."""
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return


def _terminated(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)


class LocalSwarm:
    """Peers on loopback that found and join one swarm; use as a context manager.

    Its peers end with it also when its process is terminated, unless that handles SIGTERM itself.
    """

    def __init__(
        self,
        model: Path,
        *,
        environment: dict[str, str] | None = None,
        extra: Sequence[str] = (),
        device: Sequence[str] = ("--cpu",),
        start: Start = spawned,
    ) -> None:
        """``extra`` are options of every peer, ``device`` those that say what it computes on;
        ``start`` starts a process, as `spawned` does."""
        self.model = model
        self.peers: list[LocalPeer] = []
        self._environment = environment or {}
        self._extra = (*device, *extra)
        self._start = start
        self._directory = tempfile.TemporaryDirectory(prefix="anabranch-")

    @property
    def directory(self) -> Path:
        """Holds the peers' identities and logs."""
        return Path(self._directory.name)

    @property
    def addresses(self) -> list[str]:
        """Addresses of the peers that are alive."""
        return [peer.address for peer in self.peers if peer.process.poll() is None]

    def start_peer(
        self,
        *,
        memory_gib: float | None = None,
        name: str | None = None,
        extra: Sequence[str] = (),
        host: str = "127.0.0.1",
        run_on: Sequence[str] = (),
        python: str = sys.executable,
        environment: dict[str, str] | None = None,
        initial: Sequence[str] | None = None,
        models: Sequence[Path] = (),
    ) -> LocalPeer:
        """Start one peer; the first founds the swarm. Returns at once.

        It serves the swarm's model, or chooses among ``models``.

        ``initial`` are the addresses that it joins through, of two living peers if None.
        ``run_on`` is put before the command: it runs it elsewhere, where ``host`` is its address.
        ``python`` is the interpreter of another environment; ``environment`` adds to the swarm's.
        """
        name = name or f"peer{len(self.peers)}"
        if initial is None:
            initial = [peer.address for peer in self.peers if peer.process.poll() is None][:2]
        among = ["--models", *map(str, models), "--yes"]
        which = among if models else ["--model", str(self.model)]
        command = [*run_on, python, "-m", "node.join", *which]
        command += ["--json-log", "--name", name, "--host", host]
        command += ["--identity", str(self.directory / f"{name}.key")]
        command += [] if memory_gib is None else ["--memory", repr(float(memory_gib))]
        command += ["--initial-peers", *initial] if initial else []
        log = self.directory / f"{name}-{len(self.peers)}.log"
        with log.open("wb") as file:
            process = self._start(
                [*command, *self._extra, *extra],
                {**self._environment, **(environment or {})},
                file.fileno(),
            )
        peer = LocalPeer(name=name, process=process, log=log, host=host)
        self.peers.append(peer)
        return peer

    def wait_serving(self, limit_s: float = 180.0) -> None:
        """Wait until every living peer serves."""
        until_s = time.monotonic() + limit_s
        for peer in self.peers:
            if peer.process.poll() is None:
                peer.wait_for("serving", max(1.0, until_s - time.monotonic()))

    def stop(self) -> None:
        """End every peer: first by asking all at once, then by force."""
        for peer in self.peers:
            if peer.process.poll() is None:
                peer.process.send_signal(signal.SIGINT)
        for peer in self.peers:
            peer.stop()
        self._directory.cleanup()

    def __enter__(self) -> "LocalSwarm":
        if (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        ):
            signal.signal(signal.SIGTERM, _terminated)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class ServedProcess:
    """A command that serves HTTP, and its ``url``."""

    def __init__(self, *words: str, start: Start = spawned) -> None:
        """Run ``python -m`` with these words until it serves; ``start`` is as in `LocalSwarm`."""
        said = ""
        with tempfile.NamedTemporaryFile("w+") as log:
            with Path(log.name).open("wb") as written:
                command = [sys.executable, "-m", *words]
                self.process = start(command, {}, written.fileno())
            while (found := re.search(r" at (http://\S+).*\n", said)) is None:
                ended = self.process.poll()
                said += log.read()
                assert ended is None, said
                time.sleep(0.02)
        self.url = found[1]

    def stop(self) -> int:
        """Ctrl-C; returns the exit code."""
        self.process.send_signal(signal.SIGINT)
        try:
            return self.process.wait(60)
        finally:
            if self.process.poll() is None:
                end_group(self.process.pid)
                self.process.wait()


class GatewayProcess(ServedProcess):
    """``python -m client.gateway`` on a free port."""

    def __init__(
        self, addresses: list[str], model: Path, *extra: str, start: Start = spawned
    ) -> None:
        words = ("--model", str(model), "--port", "0", "--initial-peers", *addresses)
        super().__init__("client.gateway", *words, *extra, start=start)
