"""A swarm that is asked for ten times what it can do: what it still serves, and how it says no.

Real peers on this machine, every layer held twice. First the peak: closed loops of more and more
answers at once, whose best tokens/s is the peak. Then requests arrive at ``--factor`` times the
rate that the peak could serve, each of a client that takes no for an answer (``wait_s`` 0), for
``--seconds``; one in twenty is of high priority. Goodput counts tokens of whole answers only, from
the first arrival until the last one has ended. All requests come from this process, on the same
cores as the peers, which run at a lower priority: it stands for machines of others. In the end
every peer must live, and announce all its KV as free again.
"""

import argparse
import asyncio
import math
import random
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from bench import report
from bench.local import model_of
from bench.local_swarm import LocalSwarm
from bench.reference import memory_for
from client import Swarm, UnavailableError
from client.swarm import SwarmConfig
from dht.errors import SwarmError

SPANS = ("0:4", "4:8", "0:4", "4:8")
PROMPT_TOKENS = 16
HIGH_EVERY = 20
"""One request in so many is of high priority."""
PEAK_STREAMS = (16, 32, 64, 128)
NICE = ("nice", "-n", "10")
QUIET_S = 60.0
"""How long the peers may take to announce that they hold nothing any more."""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.overload",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    parser.add_argument(
        "--model",
        default="512x8",
        help="hidden size × layers of random weights, or bundled, which is so small that asking"
        " costs more than answering (default 512x8)",
    )
    parser.add_argument("--seconds", type=float, default=120.0, help="of overload")
    parser.add_argument("--factor", type=float, default=10.0, help="times what the peak could do")
    parser.add_argument("--tokens", type=int, default=48, help="new tokens per answer")
    parser.add_argument("--clients", type=int, default=4, help="connections that requests share")
    parser.add_argument("--peak-seconds", type=float, default=10.0, help="of each closed loop")
    parser.add_argument("--memory", type=float, default=1.0, help="per peer, of the whole model's")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One request of the overload."""

    high: bool
    kind: str
    """``served``, ``rejected`` or ``failed``."""
    asked_s: float
    took_s: float
    ttft_s: float = 0.0
    reason: str = ""


class Load:
    """Requests over several connections by turns."""

    def __init__(self, clients: list[Swarm], tokens: int, seed: int) -> None:
        self._clients = clients
        self._tokens = tokens
        self._rng = random.Random(seed)
        self._turn = 0
        self.late_s: list[float] = []
        """How much later than due each request of the overload was begun: this process's lag."""

    async def ask(self, high: bool = False) -> Outcome:
        """One answer, or how it was refused."""
        self._turn += 1
        client = self._clients[self._turn % len(self._clients)]
        prompt = [self._rng.randrange(300, 2000) for _ in range(PROMPT_TOKENS)]
        asked_s = time.perf_counter()
        kind, reason, ttft_s = "served", "", 0.0
        try:
            answer = await client.generate(
                prompt,
                max_new_tokens=self._tokens,
                ignore_eos=True,
                priority="high" if high else "normal",
            )
            ttft_s = answer.ttft_s
        except UnavailableError as error:
            kind, reason = "rejected", str(error)
        except SwarmError as error:
            kind, reason = "failed", str(error)
        took_s = time.perf_counter() - asked_s
        return Outcome(
            high=high, kind=kind, asked_s=asked_s, took_s=took_s, ttft_s=ttft_s, reason=reason
        )

    async def peak(self, streams: int, seconds: float) -> float:
        """Tokens/s of ``streams`` answers at once, each followed by the next."""
        until_s = time.perf_counter() + seconds
        started_s = time.perf_counter()

        async def loop() -> int:
            served = 0
            while time.perf_counter() < until_s:
                served += (await self.ask()).kind == "served"
            return served

        served = sum(await asyncio.gather(*(loop() for _ in range(streams))))
        return served * self._tokens / (time.perf_counter() - started_s)

    async def overload(self, per_s: float, seconds: float) -> list[Outcome]:
        """Arrivals at ``per_s``, evenly, whatever becomes of them."""
        started_s, tasks = time.perf_counter(), []
        for number in range(int(per_s * seconds)):
            due_s = started_s + number / per_s
            if (left_s := due_s - time.perf_counter()) > 0:
                await asyncio.sleep(left_s)
            elif number % 8 == 0:
                await asyncio.sleep(0)
            self.late_s.append(time.perf_counter() - due_s)
            high = number % HIGH_EVERY == 0
            tasks.append(asyncio.create_task(self.ask(high)))
        return list(await asyncio.gather(*tasks))


def percentile(values: list[float], share: float) -> float:
    """Nearest rank; 0 of nothing."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0


def times(values: list[float]) -> dict[str, float]:
    """How long something took."""
    return {
        "p50": round(percentile(values, 0.5), 4),
        "p95": round(percentile(values, 0.95), 4),
        "max": round(max(values, default=0.0), 4),
    }


def figures(outcomes: list[Outcome], tokens: int) -> dict[str, Any]:
    """What became of the requests."""
    served = [o for o in outcomes if o.kind == "served"]
    rejected = [o for o in outcomes if o.kind == "rejected"]
    started_s = min(o.asked_s for o in outcomes)
    ended_s = max(o.asked_s + o.took_s for o in outcomes)
    reasons = sorted({o.reason for o in outcomes if o.kind == "failed"})
    result: dict[str, Any] = {
        "requests": len(outcomes),
        "wall_s": round(ended_s - started_s, 1),
        "served": len(served),
        "rejected": len(rejected),
        "failed": len(outcomes) - len(served) - len(rejected),
        "failures": reasons[:5],
        "tokens_per_s": round(len(served) * tokens / (ended_s - started_s), 1),
        "rejected_s": times([o.took_s for o in rejected]),
        "ttft_s": times([o.ttft_s for o in served]),
    }
    for name, high in (("normal", False), ("high", True)):
        of_class = [o for o in outcomes if o.high is high]
        let_in = sum(o.kind == "served" for o in of_class)
        result[f"served_share_{name}"] = round(let_in / max(1, len(of_class)), 4)
    return result


async def quiet(client: Swarm, free_before: dict[str, int]) -> float:
    """Seconds until every peer announces its KV as free again; infinite where one does not."""
    started_s = time.perf_counter()
    while time.perf_counter() - started_s < QUIET_S:
        await client.refresh()
        now = {p: r.kv_tokens_free for p, r in client.nodes.items()}
        if all(now.get(p) == free for p, free in free_before.items()):
            return time.perf_counter() - started_s
        await asyncio.sleep(0.5)
    return math.inf


async def measure(
    local: LocalSwarm, arguments: argparse.Namespace, console: Console
) -> dict[str, Any]:
    """All figures of one swarm."""
    config = SwarmConfig(wait_s=0.0)
    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(
                Swarm.connect(local.addresses, model=str(local.model), config=config)
            )
            for _ in range(arguments.clients)
        ]
        load = Load(clients, arguments.tokens, arguments.seed)
        free = {p: r.kv_tokens_free for p, r in clients[0].nodes.items()}
        await load.peak(4, 2.0)  # warm
        peaks = {}
        for streams in PEAK_STREAMS:
            peaks[streams] = round(await load.peak(streams, arguments.peak_seconds), 1)
            console.print(f"{streams} at once: {peaks[streams]} tokens/s")
        peak = max(peaks.values())
        per_s = arguments.factor * peak / arguments.tokens
        console.print(f"overload: {per_s:.0f} requests/s for {arguments.seconds:.0f} s")
        overload = figures(await load.overload(per_s, arguments.seconds), arguments.tokens)
        quiet_s = await quiet(clients[0], free)
        counters = sum(
            (client.counters for client in clients), start=clients[0].counters.__class__()
        )
    return {
        "kv_tokens_free": sorted(free.values()),
        "peak_tokens_per_s": {str(streams): rate for streams, rate in peaks.items()},
        "arrivals_per_s": round(per_s, 1),
        "overload": overload,
        "begun_late_s": times(load.late_s),
        "goodput_of_peak": round(overload["tokens_per_s"] / peak, 3),
        "kv_free_again": math.isfinite(quiet_s),
        "kv_free_again_announced_s": round(quiet_s, 1) if math.isfinite(quiet_s) else None,
        "peers_ended": sum(peer.process.poll() is not None for peer in local.peers),
        "peer_errors": sum(e["event"] == "error" for p in local.peers for e in p.read_events()),
        "client_counters": dict(counters),
    }


def main() -> int:
    arguments = parse()
    console = Console(stderr=True)
    result: dict[str, Any] = {
        **report.provenance(arguments.seed),
        "seconds": arguments.seconds,
        "model": arguments.model,
        "factor": arguments.factor,
        "tokens": arguments.tokens,
        "peers": len(SPANS),
    }
    with (
        tempfile.TemporaryDirectory(prefix="anabranch-bench-") as scratch,
        LocalSwarm(model_of(arguments.model, Path(scratch)), extra=("--threads", "1")) as local,
    ):
        for span in SPANS:
            gib = arguments.memory * memory_for(local.model) / 2**30
            local.start_peer(memory_gib=gib, extra=("--layers", span), run_on=NICE)
        local.wait_serving()
        result.update(asyncio.run(measure(local, arguments, console)))
    if arguments.out is not None:
        report.write(arguments.out, result)
    Console().print(result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
