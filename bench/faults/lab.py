"""Places for peers that each have a clock, a cable, process ids and a bound on memory of their own.

A place without root has its own clock (libfaketime), home, locale and temporary directory. With
root it may also be a host: a network namespace with a cable to one of two switches.
"""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from testing.wan_lab import why_not

FAKETIME = tuple(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))
SUBNET = "10.214.9"
CGROUPS = Path("/sys/fs/cgroup/memory")
SWITCHES = ("near", "far")


def why_no_clock() -> str | None:
    """Why a place cannot have a clock of its own; None when it can."""
    return None if FAKETIME else "needs libfaketime (apt-get install faketime)"


def why_no_lab() -> str | None:
    """Why this machine cannot make hosts with cables; None when it can."""
    if (reason := why_not()) is not None:
        return reason
    made = subprocess.run(
        ["ip", "link", "add", "anab-try", "type", "bridge"], capture_output=True, check=False
    )
    subprocess.run(["ip", "link", "del", "anab-try"], capture_output=True, check=False)
    return None if made.returncode == 0 else "cannot make a bridge"


@dataclass(slots=True, kw_only=True)
class Place:
    """Where one peer runs. ``directory`` holds its clock, home and temporary files.

    :attr:`command` is put before its command, and :attr:`environment` added to its environment.
    """

    directory: Path
    netns: str = ""
    own_pids: bool = False
    """Whether it is the first process of a PID namespace; needs root."""
    memory_bytes: int = 0
    """Bound on memory by a cgroup; 0: none. Needs root and cgroups of version 1."""
    locale: str = ""
    shared_tmp: Path | None = None
    _cgroup: Path | None = field(default=None)

    def __post_init__(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        self.set_clock(0.0)

    def set_clock(self, ahead_s: float) -> None:
        """Set the place's clock this far ahead of the machine's; it follows within a second."""
        beside = self.directory / "clock.new"
        beside.write_text(f"{ahead_s:+.3f}\n")
        os.replace(beside, self.directory / "clock")

    @property
    def command(self) -> list[str]:
        words = ["ip", "netns", "exec", self.netns] if self.netns else []
        if self.memory_bytes:
            words += ["sh", "-c", f'echo $$ > {self.cgroup}/cgroup.procs; exec "$@"', "sh"]
        if self.own_pids:
            words += ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
        return words

    @property
    def environment(self) -> dict[str, str]:
        tmp = self.shared_tmp or self.directory / "tmp"
        tmp.mkdir(exist_ok=True)
        said = {"HOME": str(self.directory), "TMPDIR": str(tmp)}
        if self.locale:
            said["LC_ALL"] = self.locale
        if FAKETIME:
            said |= {
                "LD_PRELOAD": str(FAKETIME[0]),
                "FAKETIME_TIMESTAMP_FILE": str(self.directory / "clock"),
                "FAKETIME_CACHE_DURATION": "1",
                "FAKETIME_DONT_FAKE_MONOTONIC": "1",  # no clock that anybody sets
            }
        return said

    @property
    def cgroup(self) -> Path:
        """The cgroup that bounds its memory."""
        if self._cgroup is None:
            self._cgroup = CGROUPS / f"anabranch-{os.getpid()}-{self.directory.name}"
            self._cgroup.mkdir(exist_ok=True)
            (self._cgroup / "memory.limit_in_bytes").write_text(str(self.memory_bytes))
        return self._cgroup

    def remove(self) -> None:
        """Remove its cgroup."""
        if self._cgroup is not None:
            with suppress(OSError):
                self._cgroup.rmdir()


class Cables:
    """Hosts ``0 … count-1`` on a switch, whose cables can be pulled; needs root."""

    def __init__(self, count: int, *, prefix: str = "anaf") -> None:
        self._hosts = [f"{prefix}{os.getpid()}-{n}" for n in range(count)]
        self._switch = f"{prefix}{os.getpid()}-s"

    def address(self, host: int) -> str:
        """The host's IPv4 address."""
        return f"{SUBNET}.{host + 1}"

    def name(self, host: int) -> str:
        """The host's network namespace."""
        return self._hosts[host]

    def run(self, host: int, argv: Sequence[str]) -> list[str]:
        """``argv`` to be run on that host."""
        return ["ip", "netns", "exec", self._hosts[host], *argv]

    def __enter__(self) -> "Cables":
        _ip("netns", "add", self._switch)
        for switch in SWITCHES:
            _ip("-n", self._switch, "link", "add", switch, "type", "bridge")
            _ip("-n", self._switch, "link", "set", switch, "up")
        for number, host in enumerate(self._hosts):
            port = f"p{number}"
            _ip("netns", "add", host)
            ends = ("type", "veth", "peer", "name", "eth0", "netns", host)
            _ip("-n", self._switch, "link", "add", port, *ends)
            _ip("-n", self._switch, "link", "set", port, "master", SWITCHES[0], "up")
            _ip("-n", host, "addr", "add", f"{self.address(number)}/24", "dev", "eth0")
            _ip("-n", host, "link", "set", "eth0", "up")
            _ip("-n", host, "link", "set", "lo", "up")
        return self

    def part(self, hosts: Collection[int]) -> None:
        """Put ``hosts`` on the far switch and all others on the near one: two networks."""
        for number in range(len(self._hosts)):
            switch = SWITCHES[number in hosts]
            _ip("-n", self._switch, "link", "set", f"p{number}", "master", switch)

    def pull(self, host: int, *, out: bool = True) -> None:
        """Pull the cable of a host, or put it in again."""
        _ip("-n", self._switch, "link", "set", f"p{host}", "down" if out else "up")

    def move(self, host: int, address: str) -> None:
        """Give a host another address."""
        _ip("-n", self._hosts[host], "addr", "flush", "dev", "eth0")
        _ip("-n", self._hosts[host], "addr", "add", f"{address}/24", "dev", "eth0")

    def __exit__(self, *_: object) -> None:
        for name in (*self._hosts, self._switch):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def child_of(process: int) -> int:
    """The process that ``unshare --fork`` runs, by this namespace's ids; 0 where there is none."""
    path = Path(f"/proc/{process}/task/{process}/children")
    with suppress(OSError, ValueError, IndexError):
        return int(path.read_text().split()[0])
    return 0


def heeds(process: int, number: signal.Signals) -> bool:
    """Whether a process has a handler for a signal now."""
    with suppress(OSError):
        for line in Path(f"/proc/{process}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def _ip(*words: str) -> None:
    subprocess.run([shutil.which("ip") or "ip", *words], check=True, stdout=sys.stderr)
