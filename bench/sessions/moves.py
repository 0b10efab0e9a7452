"""What a planned move costs: real peers leave on SIGINT while they serve.

- ``hand_over``: a session of 1,000 tokens whose first or last stage (by turns) leaves. Its usual
  time per token is the median before; the gap is the longest one from SIGINT until the peer has
  left. Beside it stands the longest gap of the same stretch of an answer that nothing happens to.
- ``neighbours``: two sessions over peers that stay, meanwhile: their time per token from SIGINT
  until the peer has left over that before. All peers share this machine's cores, so a neighbour
  here is slowed by work that would be another machine's.
- ``drain``: eight sessions over one peer, which leaves once another one serves its layers: seconds
  until its process has ended, and with it all of its memory is free.

Every answer is compared with that of the undisturbed swarm.
"""

import argparse
import asyncio
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from bench import report
from bench.sessions.answer_times import Stream
from bench.speed.local import model_of
from client import Swarm
from testing.local_swarm import LocalPeer, LocalSwarm
from testing.reference import memory_for

SPANS = ("0:4", "4:8", "0:4", "4:8")
SESSION_TOKENS = 1000
BEFORE = 32
"""New tokens before a peer leaves."""
NEW = 160
DRAIN_SESSIONS = 8
DRAIN_PROMPT = 64


def parse() -> argparse.Namespace:
    parser = report.parser_of("bench.sessions.moves", __doc__)
    parser.add_argument("--model", default="512x8", help="as bench.speed.local names them")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def prompt_of(tokens: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(300, 2000) for _ in range(tokens)]


def begin(client: Swarm, tokens: int, seed: int, new: int = NEW) -> Stream:
    """An answer to a prompt of this number of tokens."""
    prompt = prompt_of(tokens, seed)
    return Stream(client.begin(prompt, max_new_tokens=new, ignore_eos=True))


async def moved(stream: Stream, leaving: str) -> float:
    """When the answer's route has no stage of a peer any more."""
    while leaving in {stage.peer_id for stage in stream.running.route}:  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    return time.perf_counter()


class Moves:
    """One swarm whose peers leave and are started again."""

    def __init__(self, local: LocalSwarm, seed: int) -> None:
        self._local = local
        self._gib = memory_for(local.model) / 2**30
        self._seed = seed

    def start(self, span: str) -> LocalPeer:
        """Start one peer and wait until it serves."""
        peer = self._local.start_peer(memory_gib=self._gib, extra=("--layers", span))
        peer.wait_for("serving")
        return peer

    def peer_of(self, peer_id: str) -> LocalPeer:
        living = [peer for peer in self._local.peers if peer.process.poll() is None]
        return next(peer for peer in living if peer.peer_id == peer_id)

    async def left(self, peer: LocalPeer, limit_s: float = 60.0) -> float:
        """Ask a peer to leave; when its process has ended."""
        peer.signal(signal.SIGINT)
        until_s = time.perf_counter() + limit_s
        while peer.process.poll() is None:
            if time.perf_counter() > until_s:
                raise RuntimeError(f"{peer.name} has not left after {limit_s:.0f} s")
            await asyncio.sleep(0.01)
        return time.perf_counter()

    def cpu_s(self) -> dict[tuple[str, int], float]:
        """CPU seconds so far of every process, by what it does and its id."""
        spent: dict[tuple[str, int], float] = {("asking", 0): time.process_time()}
        for peer in self._local.peers:
            try:
                main = psutil.Process(peer.process.pid)
                for process in (main, *main.children(recursive=True)):
                    times = process.cpu_times()
                    what = "daemons" if process.name() == "p2pd" else "planning"
                    what = "peers" if process is main else what
                    # Solvers come and go: those that ended count at the peer that started them.
                    spent[what, process.pid] = times.user + times.system
                    if process is main:
                        spent["planning", -process.pid] = times.children_user
            except psutil.NoSuchProcess:
                continue
        return spent

    async def hand_over(self, client: Swarm, number: int) -> dict[str, Any]:
        """One long session whose stage leaves, two short ones beside it that stay."""
        seed = 100 * self._seed + number
        prompt_tokens = SESSION_TOKENS - BEFORE
        alone = begin(client, prompt_tokens, seed)
        await alone.read()
        usual_max_s = max(alone.gaps_s(alone.at_s[BEFORE], alone.at_s[-1]))
        moving = begin(client, prompt_tokens, seed)
        task = asyncio.create_task(moving.read())
        await moving.reached(1)
        # Routes take turns: the ones begun next do not share peers with the long session.
        others = [begin(client, 16, seed + 1, new=2 * NEW) for _ in range(3)]
        tasks = [asyncio.create_task(each.read()) for each in others]
        await moving.reached(BEFORE)
        route = moving.running.route
        leaving = self.peer_of(route[0 if number % 2 == 0 else -1].peer_id)
        span = SPANS[0] if number % 2 == 0 else SPANS[1]
        struck_s, before = time.perf_counter(), self.cpu_s()
        moved_s = asyncio.create_task(moved(moving, leaving.peer_id))
        left_s = await self.left(leaving)
        spent: Counter[str] = Counter()
        for (what, pid), seconds in self.cpu_s().items():
            spent[what] += seconds - before.get((what, pid), 0.0)
        await asyncio.gather(task, *tasks)
        gaps = moving.gaps_s(0.0, struck_s)
        usual_s = statistics.median(gaps)
        gap_s = max(moving.gaps_s(struck_s, left_s))
        answer = moving.running.answer()
        stayed = [
            each.per_token_s(struck_s, left_s) / each.per_token_s(0.0, struck_s)
            for each in others
            if leaving.peer_id not in {s.peer_id for s in each.running.route}
            and each.running.answer().failovers == 0
            and each.gaps_s(0.0, struck_s)
            and each.gaps_s(struck_s, left_s)
        ]
        await asyncio.to_thread(self.start, span)
        await client.reader.refresh()
        return {
            "stage": "first" if number % 2 == 0 else "last",
            "usual_token_s": round(usual_s, 4),
            "gap_s": round(gap_s, 4),
            "gap_of_usual": round(gap_s / usual_s, 2),
            "undisturbed_longest_of_usual": round(usual_max_s / usual_s, 2),
            "left_s": round(left_s - struck_s, 2),
            "moved_s": round(await moved_s - struck_s, 2),
            "cpu_s": {what: round(seconds, 2) for what, seconds in spent.items()},
            "differs": moving.token_ids != alone.token_ids,
            "failovers": answer.failovers,
            "neighbours_slowdown": [round(each - 1.0, 3) for each in stayed],
        }

    async def drain(self, client: Swarm) -> dict[str, Any]:
        """Eight sessions over one peer that leaves."""
        seeds = [1000 + self._seed * 100 + n for n in range(DRAIN_SESSIONS)]
        expected = []
        for seed in seeds:
            alone = begin(client, DRAIN_PROMPT, seed, new=4 * NEW)
            await alone.read()
            expected.append(alone.token_ids)
        streams = [begin(client, DRAIN_PROMPT, seed, new=4 * NEW) for seed in seeds]
        tasks = [asyncio.create_task(each.read()) for each in streams]
        for each in streams:
            await each.reached(8)
        firsts = {each.running.route[0].peer_id for each in streams}
        leaving = self.peer_of(firsts.pop())
        live = DRAIN_SESSIONS if not firsts else 0
        await asyncio.to_thread(self.start, SPANS[0])
        running = sum(not task.done() for task in tasks)
        struck_s = time.perf_counter()
        left_s = await self.left(leaving)
        still = sum(not task.done() for task in tasks)
        await asyncio.gather(*tasks)
        return {
            "live_sessions": min(live, running),
            "still_running_when_left": still,
            "memory_free_s": round(left_s - struck_s, 2),
            "differ": sum(
                each.token_ids != want for each, want in zip(streams, expected, strict=True)
            ),
            "failovers": sum(each.running.answer().failovers for each in streams),
        }


async def measure(local: LocalSwarm, arguments: argparse.Namespace) -> dict[str, Any]:
    """All figures."""
    moves = Moves(local, arguments.seed)
    for span in SPANS[:2]:
        await asyncio.to_thread(moves.start, span)
    async with Swarm.connect(local.addresses, model=str(local.model)) as client:
        drained = await moves.drain(client)
        for span in SPANS[:2]:  # so that every layer is held twice
            await asyncio.to_thread(moves.start, span)
        async with Swarm.connect(local.addresses, model=str(local.model)) as fresh:
            rounds = [await moves.hand_over(fresh, n) for n in range(arguments.rounds)]
    slowdowns = [each for one in rounds for each in one["neighbours_slowdown"]]
    return {
        "drain": drained,
        "hand_over": {
            "gap_of_usual_median": statistics.median(r["gap_of_usual"] for r in rounds),
            "gap_of_usual_max": max(r["gap_of_usual"] for r in rounds),
            "undisturbed_longest_of_usual_median": statistics.median(
                r["undisturbed_longest_of_usual"] for r in rounds
            ),
            "answers_that_differ": sum(r["differs"] for r in rounds),
            "failovers": sum(r["failovers"] for r in rounds),
            "neighbours_slowdown_median": statistics.median(slowdowns) if slowdowns else None,
        },
        "rounds": rounds,
    }


def main() -> int:
    arguments = parse()
    with tempfile.TemporaryDirectory(prefix="anabranch-bench-") as scratch:
        model = model_of(arguments.model, Path(scratch))
        with LocalSwarm(model, extra=("--threads", "1")) as local:
            result = {
                **report.provenance(arguments.seed),
                "model": arguments.model,
                "session_tokens": SESSION_TOKENS,
                **asyncio.run(measure(local, arguments)),
            }
    report.write(arguments.out, result)
    Console().print(result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
