"""Coordinators killed by SIGKILL under load: how long until another leads, and what clients notice.

Peers are real processes on this machine, any two of which can hold the model; clients ask without
pause. Each round kills the coordinator, waits until all others name another and it has published a
plan, and starts the killed peer again. The result is written after each; ``--resume`` goes on after
the last one, with a new swarm.
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console

from bench import report
from client import Swarm
from testing.local_swarm import ROOT, LocalPeer, LocalSwarm
from testing.reference import memory_for

MODEL = ROOT / "models" / "brook"
PROMPT = "One morning"
PEERS = 4
SHARE = 0.62
"""Part of the model's memory that each peer lends: any two can hold it."""
LIMIT_S = 120.0


def parse() -> argparse.Namespace:
    parser = report.parser_of("bench.sessions.elections", __doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--clients", type=int, default=2, help="requests at the same time")
    parser.add_argument("--resume", action="store_true", help="go on with the rounds in --out")
    parser.add_argument("--note", default="", help="said in the result, as of a shared machine")
    return parser.parse_args()


@dataclass
class Load:
    """What clients saw."""

    seconds: list[float] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    failovers: int = 0

    async def ask(self, swarm: Swarm) -> None:
        """One request after the other until cancelled."""
        while True:
            started_s = time.perf_counter()
            try:
                answer = await swarm.generate(PROMPT, max_new_tokens=24, ignore_eos=True)
            except Exception as error:  # noqa: BLE001  (whatever a client would see is counted)
                self.failed.append(f"{type(error).__name__}: {error}"[:200])
                await asyncio.sleep(0.5)
                continue
            self.seconds.append(time.perf_counter() - started_s)
            self.failovers += answer.failovers


def leader_of(swarm: LocalSwarm) -> LocalPeer:
    """The living peer that the newest event of the others names."""
    named = [
        event
        for peer in swarm.peers
        if peer.process.poll() is None
        for event in peer.read_events()
        if event["event"] == "coordinator"
    ]
    newest = max(named, key=lambda event: (event["term"], event["unix_s"]))
    return next(peer for peer in swarm.peers if peer.peer_id == newest["peer_id"])


async def kill_leader(swarm: LocalSwarm, whole_gib: float) -> dict[str, float]:
    """One round; seconds since the kill."""
    victim = await asyncio.to_thread(leader_of, swarm)
    rest = [p for p in swarm.peers if p is not victim and p.process.poll() is None]
    seen = [len(peer.read_events()) for peer in rest]
    killed_s = time.perf_counter()
    victim.kill()
    named = await asyncio.gather(
        *(
            asyncio.to_thread(peer.wait_for, "coordinator", LIMIT_S, since)
            for peer, since in zip(rest, seen, strict=True)
        )
    )
    elected_s = time.perf_counter() - killed_s
    chosen = {event["peer_id"] for event in named}
    leader, since = next(
        (peer, count) for peer, count in zip(rest, seen, strict=True) if peer.peer_id in chosen
    )
    await asyncio.to_thread(leader.wait_for, "plan", LIMIT_S, since)
    planned_s = time.perf_counter() - killed_s
    again = await asyncio.to_thread(
        swarm.start_peer, memory_gib=SHARE * whole_gib, name=victim.name
    )
    await asyncio.to_thread(again.wait_for, "serving", LIMIT_S)
    swarm.peers.remove(victim)
    return {"elected_s": elected_s, "planned_s": planned_s}


async def run(
    swarm: LocalSwarm, arguments: argparse.Namespace, whole_gib: float, result: dict[str, Any]
) -> None:
    """All rounds; the result is written after each."""
    load = Load(
        seconds=result.get("request_seconds", []),
        failed=result.get("failed", []),
        failovers=result.get("failovers", 0),
    )
    rounds = result.get("rounds", [])
    async with Swarm.connect(swarm.addresses, model=str(MODEL)) as client:
        await client.generate(PROMPT, max_new_tokens=4)
        asking = [asyncio.create_task(load.ask(client)) for _ in range(arguments.clients)]
        for number in range(len(rounds), arguments.kills):
            rounds.append(await kill_leader(swarm, whole_gib))
            await asyncio.sleep(2.0)
            result |= summary(load, rounds)
            report.write(arguments.out, result)
            print(number + 1, rounds[-1], len(load.seconds), len(load.failed), flush=True)
        for task in asking:
            task.cancel()
        await asyncio.wait(asking, timeout=10.0)


def summary(load: Load, rounds: list[dict[str, float]]) -> dict[str, Any]:
    """What the rounds so far say."""
    return {
        "kills": len(rounds),
        "elected_s": spread([r["elected_s"] for r in rounds]),
        "planned_s": spread([r["planned_s"] for r in rounds]),
        "request_s": spread(load.seconds),
        "requests": len(load.seconds) + len(load.failed),
        "failed": load.failed,
        "failovers": load.failovers,
        "rounds": rounds,
        "request_seconds": [round(seconds, 3) for seconds in load.seconds],
    }


def spread(seconds: list[float]) -> dict[str, float]:
    """Median, 95th percentile and largest."""
    ordered = sorted(seconds)
    return {
        "median": statistics.median(ordered),
        "p95": ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))],
        "max": ordered[-1],
    }


def main() -> int:
    arguments = parse()
    whole_gib = memory_for(MODEL) / 2**30
    result: dict[str, Any] = {}
    if arguments.resume and arguments.out is not None and arguments.out.exists():
        result = json.loads(arguments.out.read_text())
    result |= report.provenance(0)
    result |= {"peers": PEERS, "clients": arguments.clients, "note": arguments.note}
    with LocalSwarm(MODEL, extra=("--threads", "1")) as swarm:
        for _ in range(PEERS):
            swarm.start_peer(memory_gib=SHARE * whole_gib)
        swarm.wait_serving()
        asyncio.run(run(swarm, arguments, whole_gib, result))
    shown = result.keys() - {"rounds", "request_seconds"}
    Console().print({key: value for key, value in result.items() if key in shown})
    return 0 if not result["failed"] else 1


if __name__ == "__main__":
    sys.exit(main())
