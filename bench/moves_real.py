"""What a planned move costs between real processes that share nothing but links.

    sudo python -m bench.moves_real [--rounds 3] [--out bench/results/moves_real.json]

The setting is :mod:`bench.moving`'s. Each stage is a process in a network namespace of its own with
its own p2p daemon, and packets cross links of a set rate and delay (:mod:`bench.wan_lab`). The
engine waits as long as an RTX 4090 would and leaves the processors to those who send and receive
(:mod:`bench.timed_engine`); so a neighbour is slowed by what its own peer has to do, not by work
that would be another machine's. Beside each round stands the same under the virtual clock.
"""

import argparse
import asyncio
import json
import statistics
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from bench import moves_virtual, report
from bench.local_swarm import ROOT
from bench.moving import SESSION_TOKENS, SPEC, move, moving_peer
from bench.stand_in import SPANS, client_of
from bench.wan_lab import Shape, WanLab, why_not
from bench.wan_real import transport_on
from dht.command_line import loop_factory

MBIT, DELAY_S = moves_virtual.LINKS["100 Mbit/s, 10 ms"]
LINK = Shape(mbit=MBIT, delay_ms=DELAY_S * 1e3)
STAGES = SPANS * 2
CLIENT = len(STAGES)
END_S = 180.0
"""After which a round that has not ended is given up."""


async def run_stage(number: int, host: str, peers: tuple[str, ...]) -> None:
    """Serve, and do what lines on stdin say, each answered with a line; until stdin closes."""
    transport = await transport_on(host, peers)
    mover = await moving_peer(transport, STAGES[number], MBIT, "chosen")

    def say(reply: object) -> None:
        print(json.dumps(reply), flush=True)

    say([transport.peer_id, transport.addresses[0]])
    while line := await asyncio.to_thread(sys.stdin.readline):
        match json.loads(line):
            case ["room", int(tokens)]:
                say(await mover.announce_room(tokens))
            case ["leave"]:
                say(await mover.leave())
            case ["counters"]:
                say(await mover.counters())
    await mover.peer.close()


@dataclass(slots=True)
class StageProcess:
    """A stage in another namespace, told what to do over its stdin."""

    process: asyncio.subprocess.Process
    peer_id: str = ""
    address: str = ""

    async def _reply(self) -> Any:
        assert self.process.stdout is not None
        if not (line := await self.process.stdout.readline()):
            raise RuntimeError("a stage ended")
        return json.loads(line)

    async def _do(self, *order: object) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order).encode() + b"\n")
        return await self._reply()

    async def meet(self) -> None:
        """Wait until it serves."""
        self.peer_id, self.address = await self._reply()

    async def announce_room(self, kv_tokens_free: int) -> None:
        await self._do("room", kv_tokens_free)

    async def leave(self) -> None:
        await self._do("leave")

    async def counters(self) -> Mapping[str, int]:
        return dict(await self._do("counters"))


@asynccontextmanager
async def stages(commands: list[list[str]]) -> AsyncIterator[list[StageProcess]]:
    """All stages, begun one after the other so that each knows the first."""
    running: list[StageProcess] = []
    pipe = asyncio.subprocess.PIPE
    try:
        for command in commands:
            known = [each.address for each in running[:1]]
            process = await asyncio.create_subprocess_exec(
                *command, json.dumps(known), stdin=pipe, stdout=pipe, cwd=ROOT
            )
            running.append(StageProcess(process))
            await running[-1].meet()
        yield running
    finally:
        for each in running:
            assert each.process.stdin is not None
            each.process.stdin.close()
        for each in running:
            await each.process.wait()


async def run_client(job: dict[str, Any]) -> dict[str, Any]:
    """Start the stages on their hosts, ask from this one, and let a stage leave."""
    async with stages(job["stages"]) as movers:
        transport = await transport_on(job["host"], tuple(each.address for each in movers))
        async with client_of(transport, SPEC) as client:
            while len(client.view.nodes) < len(movers):
                await asyncio.sleep(0.1)
                await client.reader.refresh()
            # The first answers open the links between the stages; they are not measured.
            for _ in range(2 * len(movers)):
                await client.generate((1,) * 16, max_new_tokens=4, ignore_eos=True)
            return await move(client, movers, job["stage"])


def measure(stage: int, seed: int) -> dict[str, Any]:
    """One round, in a network made anew."""
    module = [sys.executable, "-m", "bench.moves_real"]
    with WanLab(len(STAGES) + 1, LINK) as lab:
        job = {
            "stage": stage,
            "host": lab.address(CLIENT),
            "stages": [
                lab.command(n, [*module, "--stage", str(n), "--host", lab.address(n), "--known"])
                for n in range(len(STAGES))
            ],
        }
        told = json.loads(lab.output(CLIENT, [*module, "--job", json.dumps(job)], END_S))
    paper = moves_virtual.cell("100 Mbit/s, 10 ms", stage, "chosen", seed)
    return {
        "stage": stage,
        **told,
        "virtual_clock": {name: paper[name] for name in ("gap_of_usual", "neighbours_slowdown")},
    }


def main() -> int:
    parser = report.parser_of("bench.moves_real", __doc__)
    parser.add_argument("--rounds", type=int, default=3, help="for each of the stages (3)")
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    parser.add_argument("--stage", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--host", help=argparse.SUPPRESS)
    parser.add_argument("--known", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        if arguments.stage is not None:
            known = tuple(json.loads(arguments.known))
            runner.run(run_stage(arguments.stage, arguments.host, known))
            return 0
        if arguments.job is not None:
            print(json.dumps(runner.run(run_client(json.loads(arguments.job)))))
            return 0
    if (reason := why_not()) is not None:
        raise SystemExit(f"error: {reason}")
    rounds, console = [], Console(stderr=True)
    for number in range(arguments.rounds * len(SPANS)):
        rounds.append(measure(number % len(SPANS), number))
        console.print(rounds[-1])
    slowdowns = [each for one in rounds for each in one["neighbours_slowdown"]]
    gaps = [one["gap_of_usual"] for one in rounds]
    result = {
        **report.provenance(0),
        "link": "100 Mbit/s, 10 ms",
        "session_tokens": SESSION_TOKENS,
        "gap_of_usual_median": statistics.median(gaps),
        "gap_of_usual_max": max(gaps),
        "neighbours_slowdown_median": statistics.median(slowdowns),
        "neighbours_slowdown_mean": round(statistics.fmean(slowdowns), 4),
        "failovers": sum(one["failovers"] for one in rounds),
        "rounds": rounds,
    }
    report.write(arguments.out, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
