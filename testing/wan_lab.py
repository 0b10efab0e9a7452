"""Real machines' worth of network on one: namespaces joined by links of set rate and delay.

Needs root and ``/dev/net/tun``. Each host is a network namespace with one TUN device; a hub in user
space (a process of its own, ``python -m testing.wan_lab``) moves the packets between them, each
directed pair with a rate, a delay and a drop-tail queue that may change while it runs. What runs
inside a host meets real TCP over a real slow link.
"""

import ctypes
import fcntl
import heapq
import json
import os
import select
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from testing.paths import ROOT

SUBNET = "10.213.7"
MTU = 1500
TUNSETIFF = 0x400454CA
IFF_TUN_NO_PI = 0x0001 | 0x1000
CLONE_NEWNET = 0x40000000
QUEUE_S = 0.2
"""Size of a link's queue, as time at its rate, before it drops packets."""
QUEUE_BYTES_MIN = 64 << 10
INSIDE = ("ip", "netns", "exec")
"""What runs a command in the network namespace that is named behind it."""
HUB_NICE = "-15"
"""The hub goes before what runs on its hosts: a network does not wait for their processors."""


def why_not() -> str | None:
    """Why this machine cannot make such a network; None when it can."""
    if os.geteuid() != 0:
        return "needs root, to make network namespaces"
    if not Path("/dev/net/tun").exists():
        return "needs /dev/net/tun"
    if shutil.which("ip") is None:
        return "needs the command ip"
    name = f"anabranch-try-{os.getpid()}"  # others may try at the same time
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False)
    if made.returncode != 0:
        return f"cannot make a network namespace: {made.stderr.decode().strip() or 'ip failed'}"
    subprocess.run(["ip", "netns", "del", name], check=False)
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One directed link."""

    mbit: float
    delay_ms: float


class WanLab:
    """Hosts ``0 … count-1`` with addresses :meth:`address`; every link of one shape at first."""

    def __init__(self, count: int, shape: Shape, *, prefix: str = "anab") -> None:
        self.names = [f"{prefix}{os.getpid()}-{n}" for n in range(count)]
        self._shape = shape
        self._hub: subprocess.Popen[str] | None = None

    def address(self, host: int) -> str:
        """The host's IPv4 address."""
        return f"{SUBNET}.{host + 1}"

    def command(self, host: int, argv: Sequence[str]) -> list[str]:
        """``argv`` to be run on that host."""
        return [*INSIDE, self.names[host], *argv]

    def inside(self, host: int) -> AbstractContextManager[None]:
        """Let this thread, and what it starts, be on that host until the context ends."""
        return inside(self.names[host])

    @contextmanager
    def stages(
        self, count: int, command: Callable[[int, list[str]], list[str]]
    ) -> Iterator[list[str]]:
        """Processes on the first ``count`` hosts, one after the other, until the context ends.

        ``command`` makes the command line of a host's process from its number and the addresses of
        those before it. Each process prints its address, and ends with its standard input. Yields
        the addresses; raises SystemExit where a process does not start.
        """
        running: list[subprocess.Popen[str]] = []
        addresses: list[str] = []
        try:
            for number in range(count):
                process = subprocess.Popen(
                    self.command(number, command(number, addresses)),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    cwd=ROOT,
                )
                running.append(process)
                assert process.stdout is not None
                if not (address := process.stdout.readline().strip()):
                    raise SystemExit(f"error: stage {number} did not start")
                addresses.append(address)
            yield addresses
        finally:
            for process in running:
                assert process.stdin is not None
                process.stdin.close()
            for process in running:
                process.wait(20)

    def output(self, host: int, argv: Sequence[str], limit_s: float) -> str:
        """What ``argv`` prints on that host. Raises SystemExit where it fails."""
        done = subprocess.run(
            self.command(host, argv),
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
            timeout=limit_s,
        )
        if done.returncode != 0:
            raise SystemExit(f"error: host {host} failed: {done.stderr[-2000:]}")
        return done.stdout

    def __enter__(self) -> "WanLab":
        for name in self.names:
            subprocess.run(["ip", "netns", "add", name], check=True)
            subprocess.run(["ip", "-n", name, "link", "set", "lo", "up"], check=True)
        self._hub = subprocess.Popen(
            ["nice", "-n", HUB_NICE, sys.executable, "-m", "testing.wan_lab", *self.names],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        out = self._hub.stdout
        assert out is not None
        if out.readline().strip() != "ready":
            raise RuntimeError("the hub did not start")
        self.shape_all(self._shape)
        return self

    def shape(self, source: int, target: int, shape: Shape) -> None:
        """Change one directed link from now on."""
        self._say(
            {"source": source, "target": target, "mbit": shape.mbit, "delay_ms": shape.delay_ms}
        )

    def close(self, host: int) -> None:
        """Let nobody open a connection to a host, as behind a router that forwards nothing."""
        self._say({"closed": host})

    def open(self, host: int) -> None:
        """Let others open connections to a host again."""
        self._say({"open": host})

    def shape_all(self, shape: Shape) -> None:
        """Change every link."""
        count = len(self.names)
        for source in range(count):
            for target in range(count):
                if source != target:
                    self.shape(source, target, shape)

    def _say(self, order: dict[str, Any]) -> None:
        assert self._hub is not None
        assert self._hub.stdin is not None
        self._hub.stdin.write(json.dumps(order) + "\n")
        self._hub.stdin.flush()

    def __exit__(self, *_: object) -> None:
        if self._hub is not None:
            self._hub.kill()
            self._hub.wait()
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], check=False)


@contextmanager
def inside(namespace: str) -> Iterator[None]:
    """Let this thread, and what it starts, be in a namespace until the context ends."""
    libc = ctypes.CDLL(None, use_errno=True)

    def enter(descriptor: int) -> None:
        if libc.setns(descriptor, CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "setns")

    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    there = os.open(f"/var/run/netns/{namespace}", os.O_RDONLY)
    enter(there)
    try:
        yield
    finally:
        enter(home)
        os.close(home)
        os.close(there)


def open_tun(namespace: str, address: str) -> int:
    """A TUN device with ``address`` in a namespace; returns its file descriptor."""
    with inside(namespace):
        tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH14x", b"wan0", IFF_TUN_NO_PI))
    for arguments in (
        ["addr", "add", f"{address}/24", "dev", "wan0"],
        ["link", "set", "wan0", "mtu", str(MTU), "txqueuelen", "1000", "up"],
    ):
        subprocess.run(["ip", "-n", namespace, *arguments], check=True)
    return tun


def opens_connection(packet: bytes) -> bool:
    """Whether an IPv4 packet is the first of a TCP connection (SYN without ACK)."""
    flags_at = 4 * (packet[0] & 15) + 13
    return packet[9] == 6 and len(packet) > flags_at and packet[flags_at] & 0x12 == 0x02


@dataclass(slots=True)
class _Link:
    bytes_per_s: float = 125e6
    delay_s: float = 0.0
    free_at_s: float = 0.0

    def arrival(self, size: int, now_s: float) -> float | None:
        """When a packet that is sent now arrives; None: the queue is full, it is dropped."""
        waiting_s = max(0.0, self.free_at_s - now_s)
        if waiting_s * self.bytes_per_s > max(QUEUE_BYTES_MIN, QUEUE_S * self.bytes_per_s):
            return None
        self.free_at_s = now_s + waiting_s + size / self.bytes_per_s
        return self.free_at_s + self.delay_s


@dataclass(slots=True)
class _Hub:
    """Moves packets until its orders end."""

    tuns: list[int]
    rest: bytes = b""
    links: dict[tuple[int, int], _Link] = field(default_factory=dict)
    due: list[tuple[float, int, int, bytes]] = field(default_factory=list)
    ticket: int = 0
    closed: set[int] = field(default_factory=set)
    """Hosts that connections can be opened from, and not to."""

    def run(self) -> None:
        hosts = {tun: index for index, tun in enumerate(self.tuns)}
        while True:
            wait_s = None
            if self.due:
                wait_s = max(0.0, self.due[0][0] - time.monotonic())
            # select waits to the microsecond; epoll would round each packet's delay up to the
            # next millisecond.
            ready, _, _ = select.select([0, *self.tuns], [], [], wait_s)
            for descriptor in ready:
                if descriptor in hosts:
                    self._take(hosts[descriptor], descriptor)
                elif not self._read_orders():
                    return
            self._deliver()

    def _read_orders(self) -> bool:
        """Obey what has arrived; False when no more will."""
        data = os.read(0, 1 << 16)
        *lines, self.rest = (self.rest + data).split(b"\n")
        for line in lines:
            self._obey(json.loads(line))
        return bool(data)

    def _obey(self, order: dict[str, Any]) -> None:
        if "closed" in order:
            self.closed.add(order["closed"])
            return
        if "open" in order:
            self.closed.discard(order["open"])
            return
        link = self.links.setdefault((order["source"], order["target"]), _Link())
        link.bytes_per_s = order["mbit"] * 125_000
        link.delay_s = order["delay_ms"] / 1e3

    def _take(self, source: int, tun: int) -> None:
        for _ in range(64):
            try:
                packet = os.read(tun, MTU + 64)
            except BlockingIOError:
                return
            if packet[0] >> 4 != 4:
                continue
            target = packet[19] - 1
            if target == source or not 0 <= target < len(self.tuns):
                continue
            if target in self.closed and opens_connection(packet):
                continue
            link = self.links.setdefault((source, target), _Link())
            at_s = link.arrival(len(packet), time.monotonic())
            if at_s is not None:
                self.ticket += 1
                heapq.heappush(self.due, (at_s, self.ticket, target, packet))

    def _deliver(self) -> None:
        now_s = time.monotonic()
        while self.due and self.due[0][0] <= now_s:
            _, _, target, packet = heapq.heappop(self.due)
            try:
                os.write(self.tuns[target], packet)
            except (BlockingIOError, OSError):
                continue  # a host that takes nothing loses packets, as on any network


def main() -> None:
    """The hub: namespaces as arguments, orders on stdin, one JSON object a line."""
    tuns = [open_tun(name, f"{SUBNET}.{n + 1}") for n, name in enumerate(sys.argv[1:])]
    print("ready", flush=True)
    _Hub(tuns).run()


if __name__ == "__main__":
    main()
