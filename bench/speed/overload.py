"""A swarm that is asked for ten times what it can do: what it still serves, and how it says no.

Real peers on this machine, every layer held twice. First the peak: closed loops of more and more
answers at once, whose best tokens/s is the peak. Then requests arrive at ``--factor`` times the
rate that the peak could serve, for ``--seconds``; none waits for room (``wait_s`` 0), and one in
twenty is of high priority. Both are counted alike: tokens of whole answers that came in a window
that leaves out the first seconds. The requests come from several processes on the same cores as the
peers, which run at a lower priority: they stand for machines of others. In the end every peer must
live, and announce all its KV as free again.

``--ablate ROUNDS``: full load alone, in windows that take turns: as answers are by default, and
plain, without drafts and without prefixes. Prompts are random, so that neither can help. Every
layer is held once, so that all answers run in the same steps. Short windows (``--peak-seconds 8``)
tell more than long ones: a machine's own pace changes with time.
"""

import argparse
import asyncio
import math
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import psutil
from rich.console import Console

from bench import report
from bench.report import percentile
from bench.speed.local import model_of
from bench.speed.overload_load import PROMPT_TOKENS, Crowd, Outcome
from client import Swarm
from testing.local_swarm import LocalSwarm
from testing.reference import memory_for

SPANS = ("0:4", "4:8", "0:4", "4:8")
PEAK_STREAMS = (16, 32, 64, 96, 128)
BEHIND = ("sh", "-c", 'echo 10 > /proc/self/autogroup; exec nice -n 10 "$@"', "peer")
"""Runs a peer behind those who ask. A peer is a session of its own, and where the kernel groups
processes by session, niceness counts within a group only: the group gets it, too."""
RAMP_S = 5.0
"""Left out of every window: answers that have only just begun."""
QUIET_S = 60.0
"""How long the peers may take to announce that they hold nothing any more."""


def parse() -> argparse.Namespace:
    parser = report.parser_of("bench.speed.overload", __doc__)
    parser.add_argument(
        "--model",
        default="512x8",
        help="hidden size × layers of random weights, or bundled, which is so small that asking"
        " costs more than answering (default 512x8)",
    )
    parser.add_argument("--seconds", type=float, default=120.0, help="of overload")
    parser.add_argument("--factor", type=float, default=10.0, help="times what the peak could do")
    parser.add_argument("--tokens", type=int, default=32, help="new tokens per answer")
    parser.add_argument("--processes", type=int, default=3, help="that ask")
    parser.add_argument(
        "--peak-seconds",
        type=float,
        default=40.0,
        help="of each closed loop: several times as long as its answers, which begin together",
    )
    parser.add_argument("--memory", type=float, default=0.6, help="per peer, of the whole model's")
    parser.add_argument("--ablate", type=int, metavar="ROUNDS", help="windows of each sort")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--note", default="", help="what else the machine did; into the result")
    return parser.parse_args()


def times(values: list[float]) -> dict[str, float]:
    """How long something took."""
    return {
        "p50": round(percentile(values, 0.5), 4),
        "p95": round(percentile(values, 0.95), 4),
        "p99": round(percentile(values, 0.99), 4),
        "max": round(max(values, default=0.0), 4),
    }


def goodput(outcomes: list[Outcome], start_s: float, seconds: float) -> float:
    """Tokens/s of whole answers in the window behind the ramp."""
    first_s, last_s = start_s + RAMP_S, start_s + seconds
    whole = [outcome for outcome in outcomes if outcome.kind == "served"]
    tokens = sum(first_s <= at_s < last_s for outcome in whole for at_s in outcome.came_s)
    return tokens / (last_s - first_s)


class Processors:
    """Processor seconds of the peers and of those who ask, daemons included, and of whatever ran
    on the machine."""

    def __init__(self, local: LocalSwarm, askers: Iterable[int]) -> None:
        roots = {"peers": [peer.process.pid for peer in local.peers], "askers": list(askers)}
        self._processes = {
            name: [each for pid in pids for each in _with_children(psutil.Process(pid))]
            for name, pids in roots.items()
        }

    def spent_s(self) -> dict[str, float]:
        """So far, by all that live still."""
        ours = {name: sum(map(_spent_s, each)) for name, each in self._processes.items()}
        machine = psutil.cpu_times()
        return {**ours, "all": float(machine.user + machine.nice + machine.system)}

    def since(self, before: dict[str, float], seconds: float) -> dict[str, float]:
        """Processors that were busy on average over the last ``seconds``."""
        return {n: round((s - before[n]) / seconds, 3) for n, s in self.spent_s().items()}


def _with_children(process: psutil.Process) -> list[psutil.Process]:
    return [process, *process.children(recursive=True)]


def _spent_s(process: psutil.Process) -> float:
    try:
        spent = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(spent.user + spent.system)


def figures(outcomes: list[Outcome], start_s: float, seconds: float) -> dict[str, Any]:
    """What became of the requests."""
    served = [o for o in outcomes if o.kind == "served"]
    rejected = [o for o in outcomes if o.kind == "rejected"]
    gaps = [b - a for o in served for a, b in zip(o.came_s, o.came_s[1:], strict=False)]
    result: dict[str, Any] = {
        "requests": len(outcomes),
        "served": len(served),
        "rejected": len(rejected),
        "failed": len(outcomes) - len(served) - len(rejected),
        "failures": sorted({o.reason for o in outcomes if o.kind == "failed"})[:5],
        "tokens_per_s": round(goodput(outcomes, start_s, seconds), 1),
        "rejected_s": times([o.took_s for o in rejected]),
        "rejected_within_100_ms": round(
            sum(o.took_s <= 0.1 for o in rejected) / max(1, len(rejected)), 4
        ),
        "told_when_to_come_back": round(
            sum(o.retry_after_s > 0 for o in rejected) / max(1, len(rejected)), 4
        ),
        "ttft_s": times([o.came_s[0] - o.asked_s for o in served]),
        "between_tokens_s": times(gaps),
        "begun_late_s": times([o.asked_s - o.due_s for o in outcomes]),
    }
    for name, high in (("normal", False), ("high", True)):
        of_class = [o for o in outcomes if o.high is high]
        let_in = sum(o.kind == "served" for o in of_class)
        result[f"served_share_{name}"] = round(let_in / max(1, len(of_class)), 4)
    return result


async def kv_free(local: LocalSwarm) -> dict[str, int]:
    """What every peer announces as free."""
    async with Swarm.connect(local.addresses, model=str(local.model)) as client:
        return {peer_id: record.kv_tokens_free for peer_id, record in client.view.nodes.items()}


async def quiet(local: LocalSwarm, free_before: dict[str, int]) -> float:
    """Seconds until every peer announces its KV as free again; infinite where one does not."""
    started_s = time.monotonic()
    async with Swarm.connect(local.addresses, model=str(local.model)) as client:
        while time.monotonic() - started_s < QUIET_S:
            await client.reader.refresh()
            now = {p: r.kv_tokens_free for p, r in client.view.nodes.items()}
            if all(now.get(p) == free for p, free in free_before.items()):
                return time.monotonic() - started_s
            await asyncio.sleep(0.5)
    return math.inf


ABLATED_STREAMS = 64
"""Answers at once in each window of ``--ablate``."""


def _spans(arguments: argparse.Namespace) -> tuple[str, ...]:
    return SPANS[: len(SPANS) // 2] if arguments.ablate else SPANS


def _start(local: LocalSwarm, arguments: argparse.Namespace) -> None:
    for span in _spans(arguments):
        gib = arguments.memory * memory_for(local.model) / 2**30
        local.start_peer(memory_gib=gib, extra=("--layers", span), run_on=BEHIND)
    local.wait_serving()


def ablated(local: LocalSwarm, arguments: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Full load in windows that take turns, ABBA: as by default, and plain."""
    rates: dict[str, list[float]] = {"default": [], "plain": []}
    costs: dict[str, list[float]] = {"default": [], "plain": []}
    seconds = arguments.peak_seconds
    with _crowd(local, arguments) as crowd:
        crowd.streams(ABLATED_STREAMS, seconds)  # warm
        processors = Processors(local, crowd.process_ids)
        for number in range(arguments.ablate):
            for name in sorted(rates, reverse=number % 2 == 1):
                spent_s = processors.spent_s()["peers"]
                start_s, outcomes = crowd.streams(ABLATED_STREAMS, seconds, plain=name == "plain")
                tokens = sum(len(outcome.came_s) for outcome in outcomes)
                costs[name].append((processors.spent_s()["peers"] - spent_s) / max(1, tokens))
                rates[name].append(tokens / (max(o.ended_s for o in outcomes) - start_s))
            console.print(f"{number + 1}: {rates['default'][-1]:.0f}, {rates['plain'][-1]:.0f}")
        crowd.stop()
    return {
        "streams": ABLATED_STREAMS,
        "window_s": seconds,
        "tokens_per_s": rates,
        "default_of_plain": paired(rates["default"], rates["plain"]),
        "peers_processor_s_per_token": costs,
        "processor_s_default_of_plain": paired(costs["default"], costs["plain"]),
    }


def paired(ours: Sequence[float], others: Sequence[float]) -> dict[str, float]:
    """The geometric mean of the ratios of pairs, and its standard error as a part of it."""
    logs = [math.log(a / b) for a, b in zip(ours, others, strict=True)]
    error = stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else math.inf
    return {"ratio": math.exp(fmean(logs)), "standard_error": error}


def _crowd(local: LocalSwarm, arguments: argparse.Namespace) -> Crowd:
    return Crowd(
        local.addresses,
        str(local.model),
        processes=arguments.processes,
        tokens=arguments.tokens,
        seed=arguments.seed,
    )


def measure(local: LocalSwarm, arguments: argparse.Namespace, console: Console) -> dict[str, Any]:
    """All figures of one swarm."""
    free = asyncio.run(kv_free(local))
    result: dict[str, Any] = {"kv_tokens_free": sorted(free.values())}
    result["sessions_of_kv_per_peer"] = min(free.values()) // (PROMPT_TOKENS + arguments.tokens)
    with _crowd(local, arguments) as crowd:
        crowd.streams(4, 2.0)  # warm
        processors = Processors(local, crowd.process_ids)
        peaks, busy, first = {}, {}, {}
        for streams in PEAK_STREAMS:
            seconds, spent_s = arguments.peak_seconds, processors.spent_s()
            start_s, outcomes = crowd.streams(streams, seconds)
            busy[str(streams)] = processors.since(spent_s, time.monotonic() - start_s)
            told = figures(outcomes, start_s, seconds)
            peaks[str(streams)], first[str(streams)] = told["tokens_per_s"], told["ttft_s"]
            console.print(f"{streams} at once: {peaks[str(streams)]} tokens/s")
        result["peak_tokens_per_s"] = peaks
        result["peak_processors_busy"] = busy
        result["peak_ttft_s"] = first
        peak = max(peaks.values())
        per_s = arguments.factor * peak / arguments.tokens
        result["arrivals_per_s"] = round(per_s, 1)
        console.print(f"overload: {per_s:.0f} requests/s for {arguments.seconds:.0f} s")
        spent_s = processors.spent_s()
        start_s, outcomes = crowd.arrivals(per_s, arguments.seconds)
        result["overload_processors_busy"] = processors.since(spent_s, time.monotonic() - start_s)
        result["overload"] = told = figures(outcomes, start_s, arguments.seconds)
        result["goodput_of_peak"] = round(told["tokens_per_s"] / peak, 3)
        quiet_s = asyncio.run(quiet(local, free))
        result["kv_free_again"] = math.isfinite(quiet_s)
        result["kv_free_again_announced_s"] = round(quiet_s, 1) if quiet_s < math.inf else None
        result["peers_ended"] = sum(peer.process.poll() is not None for peer in local.peers)
        errors = [e for p in local.peers for e in p.read_events() if e["event"] == "error"]
        result["peer_errors"] = len(errors)
        counters: Counter[str] = Counter()
        for each in crowd.stop():
            counters.update(each)
        result["client_counters"] = dict(counters)
    return result


def main() -> int:
    arguments = parse()
    console = Console(stderr=True)
    result: dict[str, Any] = {
        **report.provenance(arguments.seed),
        "seconds": arguments.seconds,
        "model": arguments.model,
        "factor": arguments.factor,
        "tokens": arguments.tokens,
        "processes": arguments.processes,
        "peers": len(_spans(arguments)),
        "note": arguments.note,
    }
    with (
        tempfile.TemporaryDirectory(prefix="anabranch-bench-") as scratch,
        LocalSwarm(model_of(arguments.model, Path(scratch)), extra=("--threads", "1")) as local,
    ):
        _start(local, arguments)
        run = ablated if arguments.ablate else measure
        result.update(run(local, arguments, console))
    report.write(arguments.out, result)
    Console().print(result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
