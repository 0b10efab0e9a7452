"""The honest side: real peers, callers, a gateway, and what they hold in memory and in records."""

import asyncio
import importlib.util
import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import psutil

from bench.fleet.peers import family_of, swarm_of
from bench.hostile.attacker import MODEL
from bench.hostile.callers import Expected, read_answers
from bench.hostile.verdict import MIB, Asked
from client import Swarm, SwarmConfig
from dht.errors import NetworkError, SwarmError
from dht.messages.types import NO_VERSION, NodeState
from testing.local_swarm import LocalPeer, LocalSwarm, PeerStartError, Process, end_group, spawned
from testing.reference import memory_for

SHARE = 0.62
"""Share of the model's memory that each peer lends: any two can hold it, so no loss of one is
final."""
SAMPLE_S = 0.5
GATEWAY_S = 60.0
TOLD = frozenset(
    {"assigned", "serving", "stays", "no_plan", "plan", "coordinator", "error", "aside"}
)
"""Events that may tell why layers were not served."""
OBSERVE_S = 20.0
MODULE = "bench.hostile"
LIGHT_PYTHON = os.environ.get("ANABRANCH_LIGHT_PYTHON", sys.executable)
"""The interpreter of light peers, which need py-libp2p."""


def light_is_there() -> bool:
    """Whether light peers can be started here."""
    found = importlib.util.find_spec("libp2p") is not None
    return found or sys.executable != LIGHT_PYTHON


@dataclass(slots=True)
class Helper:
    """A process beside the peers, in a group of its own."""

    name: str
    process: Process
    log: Path

    @property
    def lives(self) -> bool:
        return self.process.poll() is None

    def end(self) -> None:
        end_group(self.process.pid)
        self.process.wait()


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What the records say at one moment, as a new client reads them."""

    following: int
    planner: str
    """The author of the plan that the client would follow; empty: there is none."""


@dataclass(slots=True)
class Side:
    """Honest peers with those who ask them; use as a context manager."""

    expected: Expected
    swarm: LocalSwarm = field(default_factory=swarm_of)
    peers_wanted: int = 4
    light_wanted: int = 0
    """How many of them are light peers."""
    gateway: str = ""
    peers: list[LocalPeer] = field(default_factory=list)
    callers: list[Helper] = field(default_factory=list)
    samples: list[tuple[float, dict[str, float]]] = field(default_factory=list)
    """Unix times with MiB by process."""
    _watched: dict[str, psutil.Process] = field(default_factory=dict)
    _sampling: asyncio.Task[None] | None = None
    _gateway: Helper | None = None

    # Beginning and end

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._sampling is not None:
            self._sampling.cancel()
        for helper in (*self.callers, *((self._gateway,) if self._gateway else ())):
            helper.end()
        for peer in self.swarm.peers:
            end_group(peer.process.pid)  # what leaving takes is measured elsewhere
        self.swarm.stop()

    async def begin(self) -> None:
        """Start the peers and wait until they serve. Raises PeerStartError."""
        memory_gib = SHARE * memory_for(MODEL) / 2**30
        for at in range(self.peers_wanted):
            light = at >= self.peers_wanted - self.light_wanted
            kind = {"python": LIGHT_PYTHON, "extra": ("--transport", "light")} if light else {}
            self.peers.append(self.swarm.start_peer(memory_gib=memory_gib, **kind))
        await asyncio.to_thread(self.swarm.wait_serving)
        for peer in self.peers:
            root, *daemons = family_of(peer)
            self._watched[peer.name] = root
            self._watched |= {f"{peer.name}'s daemon": daemon for daemon in daemons}
        self._sampling = asyncio.create_task(self._sample())

    def call(self, number: int, *, through_gateway: bool = False, formats: bool = False) -> None:
        """Start this number of callers; without a gateway, every other one is new for each
        answer. With ``formats`` their answers follow grammars."""
        expected = self.swarm.directory / "expected.json"
        expected.write_text(json.dumps(self.expected))
        for at in range(number):
            command = ["--ask", str(expected)]
            command += ["--gateway", self.gateway] if through_gateway else []
            command += ["--fresh"] if at % 2 else []
            command += ["--formats"] if formats else []
            self.callers.append(self.run(f"caller{len(self.callers)}", MODULE, *command))

    def run(self, name: str, module: str, *arguments: str, nice: int = 0) -> Helper:
        """Start a command of this project, with the peers' addresses."""
        log = self.swarm.directory / f"{name}-{time.monotonic_ns()}.log"
        addresses = "--initial-peers" if module != MODULE else "--peers"
        command = ["nice", "-n", str(nice)] if nice else []
        command += [sys.executable, "-m", module, *arguments, addresses]
        command += [peer.address for peer in self.peers if peer.process.poll() is None]
        with log.open("wb") as file:
            return Helper(name, spawned(command, {}, file.fileno()), log)

    async def open_gateway(self) -> None:
        """Start a gateway and wait until it serves. Raises PeerStartError."""
        if self._gateway is not None:
            return
        at = ("--host", "127.0.0.1", "--port", "0", "--model", str(MODEL))
        gateway = self.run("gateway", "client.gateway", *at)
        self._gateway = gateway
        until_s = time.monotonic() + GATEWAY_S
        while not (found := re.search(r"at (http://\S+)", gateway.log.read_text())):
            if time.monotonic() > until_s or not gateway.lives:
                raise PeerStartError(f"no gateway: {gateway.log.read_text()[-500:]}")
            await asyncio.sleep(0.2)
        self.gateway = found.group(1)
        self._watched["gateway"] = psutil.Process(gateway.process.pid)

    # What is seen of it

    async def _sample(self) -> None:
        while True:
            self.samples.append((time.time(), await asyncio.to_thread(self._memory_mib)))
            await asyncio.sleep(SAMPLE_S)

    def _memory_mib(self) -> dict[str, float]:
        found = {}
        for name, process in self._watched.items():
            with suppress(psutil.NoSuchProcess):
                found[name] = round(process.memory_info().rss / MIB, 2)
        return found

    def memory_mib(self, from_s: float, until_s: float) -> dict[str, tuple[float, float, float]]:
        """Before ``from_s``, the largest since, and at ``until_s``, by process."""
        before = [each for at, each in self.samples if at < from_s][-1]
        since = [each for at, each in self.samples if from_s <= at <= until_s]
        return {
            name: (
                held,
                max((each[name] for each in since if name in each), default=held),
                since[-1].get(name, 0.0) if since else held,
            )
            for name, held in before.items()
        }

    def answers(self) -> list[Asked]:
        """Answers of all callers so far."""
        return [each for c in self.callers for each in read_answers(c.log, time.time())]

    def ended(self) -> tuple[str, ...]:
        """Processes that ended, with the last that they said."""
        helpers = [*self.callers, *((self._gateway,) if self._gateway else ())]
        gone = [(h.name, h.process, h.log) for h in helpers]
        gone += [(p.name, p.process, p.log) for p in self.peers]
        found = [
            f"{name}: {process.poll()}: {log.read_text(errors='replace')[-300:]}"
            for name, process, log in gone
            if process.poll() is not None
        ]
        lost = [name for name, each in self._watched.items() if not _runs(each)]
        return (*found, *(name for name in lost if name.endswith("daemon")))

    @property
    def ids(self) -> frozenset[str]:
        return frozenset(peer.peer_id for peer in self.peers)

    def counters(self) -> Counter[str]:
        """What the stages counted since they started, as they said last."""
        total: Counter[str] = Counter()
        for peer in self.peers:
            total.update((peer.find("stats") or {"counters": {}})["counters"])
        return total

    def told(self, from_unix_s: float, until_unix_s: float) -> list[str]:
        """What the honest peers wrote of themselves in a stretch of time, in its order."""
        found = [
            (event["unix_s"], peer.name, event)
            for peer in self.peers
            for event in peer.read_events()
            if from_unix_s <= event["unix_s"] <= until_unix_s and event["event"] in TOLD
        ]
        return [
            f"{at - from_unix_s:.1f} s {name}: "
            + " ".join(
                str(event[key]) for key in ("event", "start", "end", "reason") if key in event
            )
            for at, name, event in sorted(found, key=lambda each: each[:2])
        ]

    def leader(self) -> str:
        """Whom honest peers named as coordinator last; empty: nobody."""
        named = [
            event
            for peer in self.peers
            for event in peer.read_events()
            if event["event"] == "coordinator"
        ]
        newest: Mapping[str, Any] = max(named, key=lambda e: (e["term"], e["unix_s"]), default={})
        return str(newest.get("peer_id", ""))

    async def look(self) -> Look:
        """Read the records as a new client does; nothing is followed where none can be read."""
        addresses = [peer.address for peer in self.peers if peer.process.poll() is None]
        config = SwarmConfig(wait_s=0.0)
        try:
            async with (
                asyncio.timeout(OBSERVE_S),
                Swarm.connect(addresses, model=str(MODEL), config=config) as swarm,
            ):
                nodes = [swarm.view.nodes.get(peer_id) for peer_id in self.ids]
                plan = swarm.view.plan
        except (NetworkError, SwarmError, TimeoutError):
            return Look(following=0, planner="")
        following = sum(
            node is not None and node.state is NodeState.SERVING and node.plan_version != NO_VERSION
            for node in nodes
        )
        return Look(following=following, planner="" if plan is None else plan.coordinator)

    def newcomer(self) -> LocalPeer:
        """Start a peer that joins, looks, measures its links and leaves again."""
        addresses = [peer.address for peer in self.peers if peer.process.poll() is None]
        return self.swarm.start_peer(name="newcomer", extra=("--test",), initial=addresses[:2])


def _runs(process: psutil.Process) -> bool:
    return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)


def joined(newcomer: LocalPeer, peers: int) -> bool:
    """Whether a newcomer found at least this number of peers that serve the same weights."""
    found = newcomer.find("test")
    return found is not None and found["peers"] >= peers


async def until(condition: Callable[[], bool], limit_s: float) -> bool:
    """Wait for a condition; False: it did not come."""
    until_s = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > until_s:
            return False
        await asyncio.sleep(0.2)
    return True


def said(log: Path) -> Mapping[str, Any]:
    """The last line of JSON in a log; empty where there is none."""
    for line in reversed(log.read_text(errors="replace").splitlines()):
        with suppress(ValueError):
            found = json.loads(line)
            if isinstance(found, dict):
                return found
    return {}
