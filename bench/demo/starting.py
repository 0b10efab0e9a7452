"""The demo's swarm: how it is started, and what its peers do meanwhile, for whoever waits."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from bench.demo.slow_links import HOST, SlowLinks, free_port
from dht.messages.types import layers_text
from node.stage.draft_engine import DIRECTORY
from testing.local_swarm import LocalPeer, LocalSwarm, PeerStartError
from testing.paths import ROOT
from testing.reference import draft_memory_for, memory_for

Event = Mapping[str, Any]
MODEL = ROOT / "models" / "brook"
PROMPT = "One morning"
ROUND_TRIP_MS = 20.0
"""Of every link: between towns."""
SHARES = (0.62, 0.58, 0.55)
"""Memory of the three peers, as shares of what the whole model needs: nobody can hold it, and any
two can, so that whoever is killed is made up for."""
LIMIT_S = 180.0
MORE_S = 20.0
"""Time for which a plan is waited on that leaves a peer out, or in which peers cannot move without
others' help: the next one may have a place for all."""
LOOK_S = 0.1


@contextmanager
def volunteers(console: Console, model: Path, round_trip_ms: float) -> Iterator[LocalSwarm]:
    """Three peers that hold ``model`` together, once all serve; they end with the context.

    Every link takes ``round_trip_ms`` there and back; 0: as this machine is. Raises PeerStartError.
    """
    whole, drafter = memory_for(model), draft_memory_for(model)
    with SlowLinks(round_trip_ms / 1e3) as links, LocalSwarm(model) as swarm:
        watching = Watching(console, swarm)
        for number, share in enumerate(SHARES, start=1):
            extra = ("--draft", str(model / DIRECTORY)) if drafter else ()
            if round_trip_ms:
                port = free_port()
                extra += ("--port", str(port), "--announce", f"{HOST}:{links.before(port)}")
            peer = swarm.start_peer(
                memory_gib=(share * whole + drafter) / 2**30,
                name=f"volunteer-{number}",
                extra=extra,
            )
            watching.until_listening(peer)
        watching.until_settled()
        console.print(f"All three serve after {watching.elapsed_s:.0f} s. Asking them …\n")
        yield swarm


def phase_of(events: Sequence[Event]) -> str:
    """What a peer does, by the events that it wrote so far."""
    at = {event["event"]: number for number, event in enumerate(events)}
    assigned, serving = at.get("assigned", -1), at.get("serving", -1)
    if at.get("stays", -1) > max(assigned, serving):
        stays = events[at["stays"]]
        return f"serves {_layers(stays)}; may not move to {_layers(events[assigned])} yet"
    if assigned > serving:
        return f"loads {_layers(events[assigned])}"
    if serving >= 0:
        return f"serves {_layers(events[serving])}"
    if "measured" in at:
        no_plan = at.get("no_plan", -1)
        why = f" ({events[no_plan]['reason']})" if no_plan > at.get("plan", -1) else ""
        return f"waits for a plan{why}"
    return "measures this machine" if "listening" in at else "starts"


def newest_plan(peers: Sequence[Sequence[Event]]) -> Event | None:
    """The plan that was made last, by any of the peers."""
    plans = [event for events in peers for event in events if event["event"] == "plan"]
    return max(plans, key=lambda event: float(event["unix_s"]), default=None)


def settled(peers: Sequence[Sequence[Event]]) -> bool:
    """Whether every peer serves what the newest plan gives it, and each is given something.

    A peer that serves may be about to move: plans follow each other while peers join.
    """
    plan = newest_plan(peers)
    if plan is None:
        return False
    for events in peers:
        peer_id = next((e["peer_id"] for e in events if e["event"] == "listening"), None)
        mine = plan["assignments"].get(peer_id)
        if mine is None or phase_of(events) != f"serves {layers_text(mine)}":
            return False
    return True


def _layers(event: Event) -> str:
    return layers_text((event["start"], event["end"]))


class Watching:
    """Shows the phases of a swarm's peers until what is waited for is so.

    On a terminal one line per peer that changes in place; elsewhere a line for each change.
    """

    def __init__(self, console: Console, swarm: LocalSwarm) -> None:
        self._console = console
        self._swarm = swarm
        self._started_s = time.monotonic()
        self._shown: dict[str, str] = {}

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._started_s

    def until_listening(self, peer: LocalPeer) -> None:
        """Wait until others can join through ``peer``."""
        self._until(lambda: peer.find("listening") is not None)

    def until_settled(self) -> None:
        """Wait until all serve as planned; also end where the plan goes on without one of them, or
        where they go on serving what they hold."""
        idle_since_s = time.monotonic()

        def done() -> bool:
            nonlocal idle_since_s
            events = [peer.read_events() for peer in self._swarm.peers]
            if settled(events):
                return True
            if newest_plan(events) is None or any("loads" in phase_of(each) for each in events):
                idle_since_s = time.monotonic()
            return time.monotonic() - idle_since_s > MORE_S

        self._until(done)

    def _until(self, done: Callable[[], bool]) -> None:
        with Live(console=self._console, transient=True, auto_refresh=False) as live:
            while not done():
                self._show(live)
                self._check()
                time.sleep(LOOK_S)
        if not self._console.is_terminal:
            self._say_changes()

    def _show(self, live: Live) -> None:
        if not self._console.is_terminal:
            self._say_changes()
            return
        table = Table.grid(padding=(0, 2))
        for peer in self._swarm.peers:
            table.add_row(f"  {peer.name}", phase_of(peer.read_events()))
        table.add_row(f"  {self.elapsed_s:.0f} s", "")
        live.update(table, refresh=True)

    def _say_changes(self) -> None:
        for peer in self._swarm.peers:
            phase = phase_of(peer.read_events())
            if self._shown.get(peer.name) != phase:
                self._shown[peer.name] = phase
                line = f"  {self.elapsed_s:4.0f} s  {peer.name} {phase}"
                self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def _check(self) -> None:
        for peer in self._swarm.peers:
            if peer.process.poll() is not None:
                raise PeerStartError(f"{peer.name} ended: {peer.tail()}")
        if self.elapsed_s > LIMIT_S:
            slow = [f"{peer.name} {phase_of(peer.read_events())}" for peer in self._swarm.peers]
            raise PeerStartError(f"not all serve after {LIMIT_S:.0f} s: {'; '.join(slow)}")
