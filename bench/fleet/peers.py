"""The peers of ``bench.fleet``: started, made to leave and killed, and what each of them cost."""

import asyncio
import os
import signal
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from bench.report import percentile
from client import Swarm
from coordinator.plans.announced_problem import read_announced_problem
from dht.command_line import EXIT_DONE, EXIT_INTERRUPTED
from dht.errors import NetworkError
from dht.messages.types import RECORD_BOUNDS, NodeRecord, NodeState, Plan, Reach
from dht.records.directory import DEFAULT_NETWORK
from testing.local_swarm import LocalPeer, LocalSwarm, Start, spawned
from testing.paths import ROOT

MODEL = ROOT / "models" / "brook"
LOOK_S = 0.1
"""Between looks at the peers' logs."""
TOLD_S = 60.0
"""Time within which a peer that joined has layers, or was told why it has none."""
REASONS = frozenset({"no_plan", "waiting", "aside"})
"""Events that tell a peer's owner why it has no layers."""
SETTLE_S = 120.0
"""How long the peers may take until all follow one plan."""
LEAVE_S = 60.0
"""How long a peer that was asked to leave may take; then it is killed."""
OBSERVED_FROM = 8
"""Maximum peers through which the observer of records joins."""
DAEMON = "p2pd"


def spread(values: list[float]) -> dict[str, float] | None:
    """Median, 95th percentile (nearest rank) and largest; None of nothing."""
    if not values:
        return None
    return {
        "p50": round(statistics.median(values), 3),
        "p95": round(percentile(values, 0.95), 3),
        "max": round(max(values), 3),
    }


def mean_and_max(values: list[float]) -> dict[str, float] | None:
    """Mean and maximum; None without values."""
    if not values:
        return None
    return {"mean": round(statistics.fmean(values), 3), "max": round(max(values), 3)}


@dataclass(slots=True, eq=False)
class Member:
    """One peer of the fleet. ``ended`` says how it was made to end; empty: nobody did."""

    peer: LocalPeer
    started_unix_s: float
    ended: str = ""
    ended_unix_s: float | None = None

    @property
    def lives(self) -> bool:
        return not self.ended and self.peer.process.poll() is None

    @property
    def listens(self) -> bool:
        return self.lives and self.peer.find("listening") is not None

    def first(self, wanted: Callable[[Mapping[str, Any]], bool]) -> float | None:
        """When the first event of that kind was written, in Unix time."""
        return next((e["unix_s"] for e in self.peer.read_events() if wanted(e)), None)

    @property
    def joined_unix_s(self) -> float | None:
        return self.first(lambda event: event["event"] == "listening")

    @property
    def serving_unix_s(self) -> float | None:
        return self.first(lambda event: event["event"] == "serving")

    @property
    def told_unix_s(self) -> float | None:
        """When it had layers, or its owner was told why not."""
        return self.first(_tells)

    def is_settled(self, now_unix_s: float) -> bool:
        """Whether it has layers, was told why not, or should have been by now."""
        joined = self.joined_unix_s
        return joined is not None and (self.told_unix_s is not None or now_unix_s > joined + TOLD_S)

    @property
    def was_left_untold(self) -> bool:
        """Whether it had neither layers nor a reason for ``TOLD_S`` after it joined."""
        joined = self.joined_unix_s
        until = self.told_unix_s or self.ended_unix_s or time.time()
        return joined is not None and until > joined + TOLD_S

    def end(self, how: str) -> None:
        """Note that it is being ended."""
        self.ended, self.ended_unix_s = how, time.time()


def _tells(event: Mapping[str, Any]) -> bool:
    unreachable = event["event"] == "reach" and event["reach"] == Reach.NONE
    return event["event"] == "serving" or event["event"] in REASONS or unreachable


@dataclass(slots=True)
class Fleet:
    """Real peers that all joined by the founder's address alone."""

    swarm: LocalSwarm
    memory_gib: float
    members: list[Member] = field(default_factory=list)
    leaving: list[asyncio.Task[None]] = field(default_factory=list)
    changed_unix_s: list[float] = field(default_factory=list)
    """When peers came or went."""
    disagreement: str = ""
    """Why the peers did not follow one plan when that was looked at last."""
    looks: Counter[str] = field(default_factory=Counter)
    """How many looks found each reason why they did not, until they did: about one a second."""
    yet_to_move: int = 0
    """How many had not the plan's layers when they last agreed on one: who moved lately rests."""

    @property
    def living(self) -> list[Member]:
        """In the order in which they were started."""
        return [member for member in self.members if member.lives]

    @property
    def founder(self) -> Member:
        """The oldest living peer that listens: newcomers join by its address."""
        return next(member for member in self.members if member.listens)

    @property
    def leader(self) -> Member | None:
        """The living peer that living peers named as coordinator last; None: they named none."""
        by_id = {m.peer.peer_id: m for m in self.living if m.listens}
        named = [
            event
            for member in by_id.values()
            for event in member.peer.read_events()
            if event["event"] == "coordinator" and event["peer_id"] in by_id
        ]
        newest = max(named, key=lambda event: (event["term"], event["unix_s"]), default=None)
        return None if newest is None else by_id[newest["peer_id"]]

    async def until(self, condition: Callable[[], bool], limit_s: float) -> bool:
        """Wait for a condition on the peers' events; False: it did not come."""
        until_s = time.monotonic() + limit_s
        while not condition():
            if time.monotonic() > until_s:
                return False
            await asyncio.sleep(LOOK_S)
        return True

    def start(self) -> Member:
        """One peer more, by the founder's address alone; the first founds the swarm."""
        initial = [self.founder.peer.address] if self.members else []
        started_unix_s = time.time()
        peer = self.swarm.start_peer(memory_gib=self.memory_gib, initial=initial)
        self.members.append(Member(peer=peer, started_unix_s=started_unix_s))
        self.changed_unix_s.append(time.time())
        return self.members[-1]

    async def fill(self, peers: int, every_s: float) -> None:
        """Start peers up to this number: the founder, then one every ``every_s`` (0: all at
        once)."""
        founder = self.start()
        await asyncio.to_thread(founder.peer.wait_for, "listening")
        for _ in range(peers - 1):
            await asyncio.sleep(every_s)
            self.start()

    async def settle(self) -> None:
        """Wait until each living peer has layers, was told why not, or should have been."""

        def settled() -> bool:
            now_unix_s = time.time()
            return all(member.is_settled(now_unix_s) for member in self.living)

        await self.until(settled, SETTLE_S + TOLD_S)

    def kill(self, *victims: Member) -> None:
        """SIGKILL to these peers with all that they started, together."""
        for victim in victims:
            victim.end("killed")
            os.killpg(victim.peer.process.pid, signal.SIGKILL)
        for victim in victims:
            victim.peer.process.wait()
        self.changed_unix_s.append(time.time())

    def leave(self, member: Member) -> None:
        """Ask a peer to leave, as Ctrl-C does; returns at once."""
        member.end("leaves")
        member.peer.signal(signal.SIGINT)
        self.leaving.append(asyncio.create_task(self._see_off(member)))
        self.changed_unix_s.append(time.time())

    async def _see_off(self, member: Member) -> None:
        process = member.peer.process
        await self.until(lambda: process.poll() is not None, LEAVE_S)
        orderly = process.poll() == EXIT_DONE and member.peer.find("left") is not None
        if member.peer.find("measured") is None:  # it was not there yet
            orderly = process.poll() in {EXIT_DONE, EXIT_INTERRUPTED}
        tail = member.peer.tail()[-300:]
        member.ended = "left" if orderly else f"did not leave: {process.poll()}: {tail}"
        member.peer.stop(0.0)

    def end(self) -> None:
        """SIGKILL to all that are left: what leaving takes is measured elsewhere."""
        for task in self.leaving:
            task.cancel()
        for member in self.members:
            if member.peer.process.poll() is None:
                os.killpg(member.peer.process.pid, signal.SIGKILL)

    # What is seen of them

    def why_not_one_plan(self, plan: Plan | None, nodes: Mapping[str, NodeRecord]) -> str:
        """Why not all living peers announce this plan's version; empty where they do.

        A plan that counts on a peer which is gone is not agreed upon.
        """
        listening = {m.peer.peer_id: m.peer.name for m in self.living if m.listens}
        if plan is None or len(listening) < len(self.living):
            return "no plan is published" if plan is None else "a peer does not listen yet"
        gone = [a.peer_id for a in plan.assignments if a.peer_id not in listening]
        if gone:
            return f"plan {plan.version} counts on {len(gone)} peers that are gone"
        for peer_id, name in listening.items():
            record = nodes.get(peer_id)
            if record is None:
                return f"{name} is not announced"
            if record.plan_version != plan.version:
                return f"{name} follows {record.plan_version}, the newest plan is {plan.version}"
        return ""

    async def agreed_s(self, since_unix_s: float, limit_s: float = SETTLE_S) -> float | None:
        """Seconds from ``since_unix_s`` until all living peers follow one plan, as their records in
        the DHT say; None: they did not within ``limit_s`` from now, see ``disagreement``."""
        self.disagreement = "nothing can be read"
        self.looks.clear()
        try:
            async with asyncio.timeout(limit_s):
                while True:
                    try:
                        await self._until_agreed()
                        return round(time.time() - since_unix_s, 3)
                    except NetworkError as error:
                        self.disagreement = f"the DHT cannot be read: {error}"
                        await asyncio.sleep(1.0)
        except TimeoutError:
            return None

    async def _until_agreed(self) -> None:
        addresses = [member.peer.address for member in self.living if member.listens]
        async with Swarm.connect(addresses[:OBSERVED_FROM], model=str(MODEL)) as observer:
            while why := self.why_not_one_plan(observer.view.plan, observer.view.nodes):
                self.disagreement = why
                self.looks[why] += 1
                await asyncio.sleep(1.0)
                await observer.reader.refresh()
            self.disagreement = ""
            self.yet_to_move = yet_to_move(observer.view.plan, observer.view.nodes)

    async def links_measured(self, limit_s: float = SETTLE_S) -> bool:
        """Whether every peer has announced the links that newcomers measure once, or does so within
        ``limit_s``: only then nothing is left to do while nobody asks."""
        each = min(len(self.living) - 1, RECORD_BOUNDS.links_max)
        until_s = time.monotonic() + limit_s
        addresses = tuple(member.peer.address for member in self.living[:OBSERVED_FROM])
        while time.monotonic() < until_s:
            problem, _ = await read_announced_problem(addresses, MODEL.name, DEFAULT_NETWORK)
            # A planner's input also has links that nobody measured: guessed, as of time 0.
            measured = Counter(link.target for link in problem.links if link.measured_unix_s)
            if all(measured[m.peer.peer_id] >= each for m in self.living):
                return True
            await asyncio.sleep(5.0)
        return False

    def seen(self) -> dict[str, Any]:
        """What the peers' events say of the whole run."""
        served = [(m, at) for m in self.members if (at := m.serving_unix_s) is not None]
        elected = {
            (event["term"], event["peer_id"])
            for member in self.members
            for event in member.peer.read_events()
            if event["event"] == "coordinator"
        }
        return {
            "peers_started": len(self.members),
            "peers_served": len(served),
            "serving_seconds": [round(at - m.started_unix_s, 3) for m, at in served],
            "untold": [m.peer.name for m in self.members if m.was_left_untold],
            "elections": len(elected),
            "ended_unasked": [
                f"{m.peer.name}: {m.peer.process.poll()}: {m.peer.tail()[-300:]}"
                for m in self.members
                if not m.ended and not m.lives
            ],
            "never_joined": [m.peer.name for m in self.living if not m.listens],
            "left_badly": [
                f"{m.peer.name} {m.ended}" for m in self.members if m.ended.startswith("did not")
            ],
        }


def yet_to_move(plan: Plan | None, nodes: Mapping[str, NodeRecord]) -> int:
    """How many peers do not serve the layers that a plan gives them."""
    return sum(
        record.state is not NodeState.SERVING or (record.start, record.end) != (a.start, a.end)
        for a in (plan.assignments if plan is not None else ())
        if (record := nodes.get(a.peer_id)) is not None
    )


def traffic_of(peer: LocalPeer) -> dict[str, int] | None:
    """Bytes that a peer sent and received since it started, by purpose; None: it has not said."""
    event = peer.find("traffic")
    return None if event is None else dict(event["bytes"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What one peer's processes used until now, and hold."""

    python_cpu_s: float
    daemon_cpu_s: float
    resident_mib: float
    pss_mib: float
    descriptors: int
    daemon_written_bytes: int
    """By the daemon, to other daemons and to its own peer."""
    purposes: dict[str, int] | None


def cost_of(peer: LocalPeer) -> Cost:
    """Cost of the peer's Python, of what it started and ended (such as solvers), and of its
    daemon."""
    root, *daemons = family = family_of(peer)
    ended = root.cpu_times()
    memory = [process.memory_full_info() for process in family]
    return Cost(
        python_cpu_s=_cpu_s(root) + ended.children_user + ended.children_system,
        daemon_cpu_s=sum(_cpu_s(process) for process in daemons),
        resident_mib=sum(each.rss for each in memory) / 2**20,
        pss_mib=sum(each.pss for each in memory) / 2**20,
        descriptors=sum(process.num_fds() for process in family),
        daemon_written_bytes=sum(process.io_counters().write_chars for process in daemons),
        purposes=traffic_of(peer),
    )


def family_of(peer: LocalPeer) -> list[psutil.Process]:
    """The peer's Python and then its daemon, without what it starts and ends, such as solvers."""
    root = psutil.Process(peer.process.pid)
    return [root, *(child for child in root.children(recursive=True) if _is_daemon(child))]


def _is_daemon(process: psutil.Process) -> bool:
    try:
        return bool(process.name().startswith(DAEMON))
    except psutil.NoSuchProcess:  # a solver that has just ended
        return False


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


async def quiet(fleet: Fleet, window_s: float) -> dict[str, Any]:
    """What the living peers cost while nobody asks them anything, over ``window_s``.

    The loopback's total is the machine's, that of other programs on it included.
    """

    def all_costs() -> tuple[float, int, dict[str, Cost]]:
        sent = psutil.net_io_counters(pernic=True)["lo"].bytes_sent
        return time.monotonic(), sent, {m.peer.name: cost_of(m.peer) for m in fleet.living}

    before_s, sent_before, before = await asyncio.to_thread(all_costs)
    await asyncio.sleep(window_s)
    after_s, sent_after, after = await asyncio.to_thread(all_costs)
    passed_s = after_s - before_s
    pairs = [(before[name], after[name]) for name in before.keys() & after.keys()]
    python = [100 * (b.python_cpu_s - a.python_cpu_s) / passed_s for a, b in pairs]
    daemon = [100 * (b.daemon_cpu_s - a.daemon_cpu_s) / passed_s for a, b in pairs]
    written = [(b.daemon_written_bytes - a.daemon_written_bytes) * 60 / passed_s for a, b in pairs]
    return {
        "window_s": round(passed_s, 3),
        "peers": len(pairs),
        "cpu_percent_of_a_core": mean_and_max([a + b for a, b in zip(python, daemon, strict=True)]),
        "cpu_percent_python": mean_and_max(python),
        "cpu_percent_daemon": mean_and_max(daemon),
        "resident_mib": mean_and_max([b.resident_mib for _, b in pairs]),
        "pss_mib": mean_and_max([b.pss_mib for _, b in pairs]),
        "descriptors": mean_and_max([float(b.descriptors) for _, b in pairs]),
        "loopback_bytes_per_peer_per_minute": round(
            (sent_after - sent_before) * 60 / passed_s / max(1, len(pairs))
        ),
        "daemon_written_bytes_per_minute": mean_and_max(written),
        "bytes_per_minute_by_purpose": by_purpose(pairs, passed_s),
    }


def by_purpose(pairs: list[tuple[Cost, Cost]], passed_s: float) -> dict[str, Any] | None:
    """Bytes per peer and minute by purpose; None where no peer has said."""
    counted = [
        (a.purposes, b.purposes)
        for a, b in pairs
        if a.purposes is not None and b.purposes is not None
    ]
    purposes = {purpose for _, after in counted for purpose in after}
    return {
        purpose: mean_and_max(
            [(b.get(purpose, 0) - a.get(purpose, 0)) * 60 / passed_s for a, b in counted]
        )
        for purpose in sorted(purposes)
    } or None


def swarm_of(model: Path = MODEL, start: Start = spawned) -> LocalSwarm:
    """An empty swarm whose peers compute on one thread each."""
    return LocalSwarm(model, extra=("--threads", "1"), start=start)
