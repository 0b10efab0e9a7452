"""Random faults over six real peers, each on a host of its own, while somebody asks all the time.

Needs root. Each peer has a clock, a cable, a temporary directory and a cgroup of its own, and is
started again when it ends, as a service would. One fault after the other, drawn by the seed: a
clock jumps, cables are pulled or the network is parted, a peer is killed or stopped, a process in
another PID namespace shares a peer's temporary directory, something else takes a peer's memory.

For each fault: the longest time for which whoever asked saw neither a token nor a word, when the
first owner was told of it, and how long after its end all peers were seen to serve and a whole
answer came.
"""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import report
from bench.faults.lab import Cables, Place, why_no_clock, why_no_lab
from testing.local_swarm import LocalPeer, LocalSwarm, end_group
from testing.paths import ROOT
from testing.reference import memory_for

MODEL = ROOT / "models" / "brook"
PEERS, ASKER = 6, 6
SHARE = 0.45
"""Part of the model's memory that each peer lends: every layer has two holders, with room."""
PORT = "31337"
MEMORY_BYTES = 3 << 29
SILENT_MAX_S, BACK_MAX_S = 15.0, 60.0
"""What must hold: no longer silence for who asks, all back so soon."""
SERVICE_S = 5.0
"""Time after which the service starts a peer again that has ended."""
TOLD = frozenset({"clock", "unseen", "seen", "coordinator", "error", "waiting", "plan", "no_plan"})
"""Events by which an owner is told of a fault."""
WORDS = ("begin", "token", "status", "done", "failed")
"""What whoever asks sees, but for who serves."""
SWEEPS = "from dht.daemon.process import SocketDirectory as S; S.make().remove()"
HOG = "held = bytearray(8 << 30); held[::4096] = b'x' * len(held[::4096])"


@dataclass(slots=True, kw_only=True)
class World:
    """Six peers, who asks them, and the service that starts them again."""

    cables: Cables
    swarm: LocalSwarm
    places: list[Place]
    rng: random.Random
    peers: dict[int, LocalPeer] = field(default_factory=dict)
    founder: str = ""
    heard: list[dict[str, Any]] = field(default_factory=list)
    held: set[int] = field(default_factory=set)
    """Hosts whose peer is not to be started again yet."""
    exits: list[tuple[int, int | None]] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    def start(self, host: int) -> LocalPeer:
        """Start the peer of a host: by the founder's address, as its owner typed it."""
        place = self.places[host]
        memory = {"ANABRANCH_MEMORY": str(place.directory / "network.json")}
        peer = self.swarm.start_peer(
            name=f"host{host}",
            host=self.cables.address(host),
            memory_gib=SHARE * memory_for(MODEL) / 2**30,
            extra=("--port", PORT),
            run_on=place.command,
            environment={**place.environment, **memory, "ANABRANCH_SERVICE": "1"},
            initial=[self.founder] if self.founder and host else [],
        )
        self.peers[host] = peer
        return peer

    def serve(self) -> None:
        """Start again what has ended, until the end."""
        ended: dict[int, float] = {}
        while not self.over.wait(0.5):
            for host, peer in list(self.peers.items()):
                if peer.process.poll() is None:
                    ended.pop(host, None)
                    continue
                since_s = ended.setdefault(host, time.monotonic())
                if host not in self.held and time.monotonic() - since_s >= SERVICE_S:
                    self.exits.append((host, peer.process.returncode))
                    end_group(peer.process.pid)
                    self.start(host)

    def hear(self, asker: "subprocess.Popen[str]") -> None:
        """Note what who asks sees."""
        assert asker.stdout is not None
        for line in asker.stdout:
            if line.startswith("{"):
                self.heard.append(json.loads(line))

    def since(self, s: float, *kinds: str) -> list[dict[str, Any]]:
        """What was heard since then, of these kinds."""
        return [each for each in self.heard if each["s"] >= s and each["kind"] in kinds]

    def are_back(self, since_s: float) -> bool:
        """Whether all peers were seen to serve, and a whole answer came, since then."""
        seen = self.since(since_s, "serving")
        return bool(self.since(since_s, "done") and seen and len(seen[-1]["peers"]) == PEERS)


Ends = Callable[[], None]


def clock(world: World, hosts: list[int]) -> Ends:
    """One clock jumps."""
    place = world.places[hosts[0]]
    place.set_clock(world.rng.choice((-1, 1)) * world.rng.choice((20.0, 3600.0, 8 * 3600.0)))
    return lambda: place.set_clock(0.0)


def cable(world: World, hosts: list[int]) -> Ends:
    """One to three cables are pulled."""
    pulled = hosts[: world.rng.randint(1, 3)]
    for host in pulled:
        world.cables.pull(host)
    return lambda: [world.cables.pull(host, out=False) for host in pulled] and None


def part(world: World, hosts: list[int]) -> Ends:
    """The network is cut in two halves."""
    world.cables.part(hosts[:3])
    return lambda: world.cables.part(())


def kill(world: World, hosts: list[int]) -> Ends:
    """One peer is killed, and stays away until the end."""
    host = hosts[0]
    world.held.add(host)
    world.peers[host].kill()
    return lambda: world.held.discard(host)


def stop(world: World, hosts: list[int]) -> Ends:
    """One peer's machine stands still, with its daemon."""
    group = world.peers[hosts[0]].process.pid
    os.killpg(group, signal.SIGSTOP)
    return lambda: os.killpg(group, signal.SIGCONT)


def pid(world: World, hosts: list[int]) -> Ends:
    """A process of another PID namespace cleans up in a peer's temporary directory."""
    place = world.places[hosts[0]]
    command = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", SWEEPS]
    subprocess.run(command, cwd=ROOT, env={**os.environ, **place.environment}, check=True)
    return lambda: None


def memory(world: World, hosts: list[int]) -> Ends:
    """Something else takes all memory of a peer's cgroup until one of both is killed."""
    place = world.places[hosts[0]]
    hog = subprocess.Popen([*place.command, sys.executable, "-c", HOG], stderr=subprocess.DEVNULL)

    def end() -> None:
        hog.kill()
        hog.wait()

    return end


FAULTS: dict[str, tuple[Callable[[World, list[int]], Ends], tuple[float, float]]] = {
    "clock": (clock, (20.0, 40.0)),
    "cable": (cable, (20.0, 90.0)),
    "part": (part, (70.0, 90.0)),
    "kill": (kill, (5.0, 30.0)),
    "stop": (stop, (10.0, 40.0)),
    "pid": (pid, (5.0, 10.0)),
    "memory": (memory, (5.0, 15.0)),
}
"""Each with the least and the longest time that it lasts, in seconds."""


def one(world: World, name: str) -> dict[str, Any]:
    """Play one fault to its end and until all are back; its figures."""
    begin, (least_s, most_s) = FAULTS[name]
    hosts = world.rng.sample(range(PEERS), PEERS)
    lasts_s = round(world.rng.uniform(least_s, most_s), 1)
    before = {host: len(peer.read_events()) for host, peer in world.peers.items()}
    began_s = time.monotonic()
    logs = {host: peer.log for host, peer in world.peers.items()}
    ends = begin(world, hosts)
    told_s = None
    while (now_s := time.monotonic()) - began_s < lasts_s:
        if told_s is None and any(
            event["event"] in TOLD
            for host, peer in world.peers.items()
            for event in peer.read_events()[before[host] if peer.log == logs[host] else 0 :]
        ):
            told_s = now_s - began_s
        time.sleep(0.25)
    ends()
    ended_s = time.monotonic()
    while not world.are_back(ended_s) and time.monotonic() - ended_s < 5 * BACK_MAX_S:
        time.sleep(0.25)
    back_s = time.monotonic() - ended_s
    words = [
        each["s"] for each in world.since(began_s, "begin", "token", "status", "done", "failed")
    ]
    gaps = [later - earlier for earlier, later in zip([began_s, *words], words, strict=False)]
    result = {
        "fault": name,
        "hosts": hosts[:3],
        "lasted_s": lasts_s,
        "silent_s": round(max(gaps, default=ended_s - began_s), 1),
        "owner_told_s": None if told_s is None else round(told_s, 1),
        "back_s": round(back_s, 1),
        "failed": [each["why"] for each in world.since(began_s, "failed")],
        "exits": world.exits.copy(),
    }
    world.exits.clear()
    result["holds"] = result["silent_s"] <= SILENT_MAX_S and back_s <= BACK_MAX_S
    return result


def play(minutes: float, seed: int, names: list[str]) -> list[dict[str, Any]]:
    """Faults for that time; their figures in order."""
    rng, results = random.Random(seed), []
    with ExitStack() as stack:
        cables = stack.enter_context(Cables(PEERS + 1))
        swarm = stack.enter_context(LocalSwarm(MODEL, extra=("--threads", "1")))
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="af-", dir="/tmp")))
        places = [
            Place(directory=directory / f"h{n}", netns=cables.name(n), memory_bytes=MEMORY_BYTES)
            for n in range(PEERS)
        ]
        for place in places:
            stack.callback(place.remove)
        world = World(cables=cables, swarm=swarm, places=places, rng=rng)
        world.founder = world.start(0).address
        for host in range(1, PEERS):
            world.start(host)
        swarm.wait_serving()
        asker = subprocess.Popen(
            cables.run(ASKER, [sys.executable, "-m", "bench.faults.asker", str(MODEL)])
            + [peer.address for peer in world.peers.values()],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        stack.callback(asker.wait, 20)
        stack.callback(lambda: asker.stdin and asker.stdin.close())
        threads = [
            threading.Thread(target=world.serve, daemon=True),
            threading.Thread(target=world.hear, args=(asker,), daemon=True),
        ]
        for thread in threads:
            thread.start()
        stack.callback(world.over.set)
        while not world.are_back(0.0):
            time.sleep(0.25)
        until_s = time.monotonic() + 60 * minutes
        while time.monotonic() < until_s:
            results.append(one(world, rng.choice(names)))
            print(json.dumps(results[-1]), flush=True)
        world.over.set()
        threads[0].join()
    return results


def main() -> int:
    """The command; returns its exit code: 1 where a fault was silent, or not all came back."""
    parser = report.parser_of("bench.faults", __doc__, writes=False)
    add = parser.add_argument
    add("--minutes", type=float, default=60.0, help="how long new faults begin (60)")
    add("--only", nargs="+", choices=tuple(FAULTS), default=list(FAULTS), help="these (all)")
    add("--seed", type=int, default=0, help="of the faults (0)")
    add("--json", type=Path, metavar="FILE", help="write the figures there, too")
    arguments = parser.parse_args()
    if (reason := why_no_lab() or why_no_clock()) is not None:
        print(f"not played: {reason}", file=sys.stderr)
        return 2
    results = play(arguments.minutes, arguments.seed, arguments.only)
    held = sum(each["holds"] for each in results)
    print(f"{held} of {len(results)} hold")
    told = {"minutes": arguments.minutes, "faults": results, "hold": held}
    report.write(arguments.json, {**report.provenance(arguments.seed), **told})
    return 0 if held == len(results) else 1


if __name__ == "__main__":
    sys.exit(main())
