"""How long losing a peer is felt, with real processes that are killed by SIGKILL.

Three figures groups, over several rounds: a killed coordinator (until the others name another,
until the next request is answered), a killed holder of layers that nobody else holds (until the
client names the layers, until it answers again after the peer was restarted), and a last stage
killed in the middle of an answer (the longest gap between two tokens).
"""

import argparse
import asyncio
import statistics
import sys
import time
from typing import Any

from rich.console import Console

from bench import report
from client import Swarm
from testing.local_swarm import ROOT, LocalPeer, LocalSwarm
from testing.reference import memory_for

MODEL = ROOT / "models" / "brook"
PROMPT = "One morning"
ANY_TWO, ALL_THREE = 0.62, 0.45
"""Parts of the model's memory that each peer lends: any two can hold it, or only all three."""


def parse() -> argparse.Namespace:
    parser = report.parser_of("bench.sessions.losses", __doc__)
    parser.add_argument("--rounds", type=int, default=2)
    return parser.parse_args()


def start(shares: list[float], whole_gib: float) -> LocalSwarm:
    """Peers that lend these parts, all serving; the caller stops the swarm."""
    swarm = LocalSwarm(MODEL, extra=("--threads", "1"))
    for share in shares:
        swarm.start_peer(memory_gib=share * whole_gib)
    swarm.wait_serving()
    return swarm


def peer_of(swarm: LocalSwarm, peer_id: str) -> LocalPeer:
    return next(peer for peer in swarm.peers if peer.peer_id == peer_id)


async def answered_s(swarm: Swarm, since_s: float) -> float:
    """Seconds from ``since_s`` until a short request is answered."""
    await swarm.generate(PROMPT, max_new_tokens=4)
    return time.perf_counter() - since_s


def lose_coordinator(whole_gib: float) -> dict[str, float]:
    """Kill the coordinator of three peers, any two of which can hold the model."""
    with start([ANY_TWO] * 3, whole_gib) as swarm:
        named = swarm.peers[0].find("coordinator") or {}
        victim = peer_of(swarm, named["peer_id"])
        rest = [peer for peer in swarm.peers if peer is not victim]

        async def run() -> dict[str, float]:
            async with Swarm.connect([p.address for p in rest], model=str(MODEL)) as client:
                await client.generate(PROMPT, max_new_tokens=4)
                seen = [len(peer.read_events()) for peer in rest]
                killed_s = time.perf_counter()
                victim.kill()
                answer = asyncio.create_task(answered_s(client, killed_s))
                for peer, since in zip(rest, seen, strict=True):
                    await asyncio.to_thread(peer.wait_for, "coordinator", 90.0, since)
                elected_s = time.perf_counter() - killed_s
                return {"elected_s": elected_s, "answered_s": await answer}

        return asyncio.run(run())


def lose_layers(whole_gib: float) -> dict[str, float]:
    """Kill a peer without whose layers the model cannot be served, and start it again."""
    with start([ALL_THREE] * 3, whole_gib) as swarm:
        victim = swarm.peers[2]
        said_s: list[float] = []

        named = asyncio.Event()

        def on_status(text: str) -> None:
            if "held by nobody" in text and not said_s:
                said_s.append(time.perf_counter())
                named.set()

        async def run() -> dict[str, float]:
            addresses = [peer.address for peer in swarm.peers[:2]]
            async with Swarm.connect(addresses, model=str(MODEL), on_status=on_status) as client:
                await client.generate(PROMPT, max_new_tokens=4)
                victim.kill()
                asked_s = time.perf_counter()
                answer = asyncio.create_task(answered_s(client, asked_s))
                await named.wait()
                restarted_s = time.perf_counter()
                swarm.start_peer(memory_gib=ALL_THREE * whole_gib, name=victim.name)
                done_s = asked_s + await answer
                return {
                    "named_s": said_s[0] - asked_s,
                    "answered_after_restart_s": done_s - restarted_s,
                }

        return asyncio.run(run())


def lose_stage(whole_gib: float) -> dict[str, float]:
    """Kill the last stage in the middle of an answer; four peers, any two hold the model."""
    with start([ANY_TWO] * 4, whole_gib) as swarm:

        async def run() -> dict[str, float]:
            async with Swarm.connect(swarm.addresses, model=str(MODEL)) as client:
                await client.generate(PROMPT, max_new_tokens=4)
                running = client.begin(PROMPT, max_new_tokens=160, ignore_eos=True)
                tokens, gap_s, last_s = 0, 0.0, 0.0
                async for piece in running:
                    now_s = time.perf_counter()
                    if tokens > 40:
                        gap_s = max(gap_s, now_s - last_s)
                    last_s = now_s
                    before, tokens = tokens, tokens + len(piece.token_ids)
                    if before <= 40 < tokens:
                        peer_of(swarm, running.route[-1].peer_id).kill()
                answer = running.answer()
                return {"longest_gap_s": gap_s, "failovers": float(answer.failovers)}

        return asyncio.run(run())


def main() -> int:
    arguments = parse()
    whole_gib = memory_for(MODEL) / 2**30
    result: dict[str, Any] = report.provenance(0)
    for name, lose in {
        "coordinator_killed": lose_coordinator,
        "layers_lost": lose_layers,
        "stage_killed_mid_answer": lose_stage,
    }.items():
        rounds = [lose(whole_gib) for _ in range(arguments.rounds)]
        median = {key: statistics.median(r[key] for r in rounds) for key in rounds[0]}
        result[name] = {"median": median, "rounds": rounds}
        report.write(arguments.out, result)
    Console().print(result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
