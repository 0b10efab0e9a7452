"""Machines that never had this software: homes without a file, on a network of their own."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from testing.paths import ROOT
from testing.terminal import Terminal

SUBNET = "192.168.77"
"""A home network's, since public addresses are dialled by other rules."""


@dataclass(frozen=True, slots=True)
class Newcomer:
    """A machine with nothing at home."""

    home: Path
    inside: tuple[str, ...] = ()
    """What runs a command on this machine's network; empty: on this machine itself."""
    alone: tuple[str, ...] = ()
    """What ``join`` must be told where this machine has no network of its own."""

    @property
    def environment(self) -> dict[str, str]:
        """A login's variables, and none of this process's own."""
        own = f"{self.home / 'bin'}:{Path(sys.executable).parent}"
        return {
            "PATH": f"{own}:{os.environ['PATH']}",
            "HOME": str(self.home),
            "LANG": "C.UTF-8",
        }

    def terminal(self, *command: str, columns: int = 80, lines: int = 24) -> Terminal:
        """Start a command on a terminal in this project's directory."""
        return Terminal(
            [*self.inside, *command],
            environment=self.environment,
            directory=ROOT,
            columns=columns,
            lines=lines,
        )

    def pasted(self, line: str, *, columns: int = 80, lines: int = 24) -> Terminal:
        """Start what somebody pastes into a shell."""
        return self.terminal("sh", "-c", f"exec {line}", columns=columns, lines=lines)

    def ran(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command to its end, without a terminal."""
        return subprocess.run(
            [*self.inside, *command],
            env=self.environment,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )


@contextlib.contextmanager
def newcomers(first: Path, second: Path) -> Iterator[tuple[Newcomer, Newcomer]]:
    """Two machines with these homes, each in a network namespace, with a cable between them.

    Where no namespace can be made they share this machine's loopback.
    """
    for home in (first, second):
        (home / "bin").mkdir(parents=True)
    with contextlib.ExitStack() as stack:
        try:
            one = stack.enter_context(_network())
            other = stack.enter_context(_network(one))
            _join_by_cable(one, other)
        except (OSError, subprocess.CalledProcessError):
            here = ("--host", "127.0.0.1")
            yield Newcomer(home=first, alone=here), Newcomer(home=second, alone=here)
            return
        yield Newcomer(home=first, inside=one.enter), Newcomer(home=second, inside=other.enter)


@dataclass(frozen=True, slots=True)
class _Network:
    """A network namespace, as long as the process ``pid`` lives."""

    pid: int

    @property
    def user(self) -> tuple[str, ...]:
        """What enters the user namespace that it is in: only root needs none."""
        if os.geteuid() == 0:
            return ()
        return ("nsenter", "-t", str(self.pid), "-U", "--preserve-credentials")

    @property
    def enter(self) -> tuple[str, ...]:
        """What runs a command in it."""
        return (*(self.user or ("nsenter", "-t", str(self.pid))), "-n")


@contextlib.contextmanager
def _network(beside: _Network | None = None) -> Iterator[_Network]:
    """A network namespace, ``beside`` another in the same user namespace. Raises OSError."""
    unshare = ("unshare", "-n") if beside or os.geteuid() == 0 else ("unshare", "-r", "-n")
    holder = subprocess.Popen(
        [*(beside.user if beside else ()), *unshare, "sh", "-c", "echo; exec cat"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    try:
        if holder.stdout.readline() != b"\n":
            raise OSError("no network namespace can be made here")
        yield _Network(holder.pid)
    finally:
        holder.stdin.close()
        holder.wait()


def _join_by_cable(*networks: _Network) -> None:
    """Give both networks an end of a cable, each with an address. Raises CalledProcessError."""

    def ip(network: _Network, *words: str) -> None:
        subprocess.run([*network.enter, "ip", *words], check=True, capture_output=True)

    one, other = networks
    ends = ("lan0", "type", "veth", "peer", "name", "lan0", "netns", str(other.pid))
    ip(one, "link", "add", *ends)
    for number, network in enumerate(networks):
        ip(network, "link", "set", "lo", "up")
        ip(network, "addr", "add", f"{SUBNET}.{number + 1}/24", "dev", "lan0")
        ip(network, "link", "set", "lan0", "up")
