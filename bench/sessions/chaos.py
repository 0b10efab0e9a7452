"""What a reader notices when volunteers vanish: real peers, lost in the middle of real answers.

Nine peers, or ``--peers``, six at least; every layer is held at least twice at every strike. Each
trial streams one answer, strikes while it runs, and compares it token by token with the answer of
the undisturbed swarm; every other trial is sampled. The kinds of strike:

- ``kill``: SIGKILL to a random stage of the answer's route.
- ``stop``: SIGSTOP to it: its connections stay open, and its daemon answers for it on no stream.
- ``black_hole``: SIGSTOP to its network daemon alone: nothing goes in or out, nothing is closed,
  while the peer itself goes on. (There is no packet filter on every machine; to the others it is
  the same.)
- ``coordinator``: SIGKILL to the elected coordinator, on the route or not.
- ``bootstrap``: SIGKILL to the peer that founded the swarm, by whose address the client came.

What was killed is then started again, what was stopped goes on (SIGCONT), and the next trial waits
only until every layer is held twice: it may share the machine with a peer that starts. A result is
written after every trial; ``--resume`` goes on with one, and ``--minutes`` ends a slice of them:
``--resume --minutes 7 --out bench/results/chaos.json`` until it says that all are done. Gaps are
between two tokens, from the strike on; beside them stands what a plain prefill of the same history
takes. One client asks all but ``bootstrap``, for each of which a new one comes by the founder's
address alone.
"""

import argparse
import asyncio
import math
import random
import signal
import sys
import time
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from bench import report
from bench.report import percentile
from client import GenerationOptions, Swarm, UnavailableError
from testing.local_swarm import LocalPeer, LocalSwarm, end_group
from testing.paths import ROOT
from testing.reference import memory_for

MODEL = ROOT / "models" / "brook"
PROMPT = "Once upon a time there was"
KINDS = ("kill", "stop", "black_hole", "coordinator", "bootstrap")
NEW_TOKENS = 120
SPANS = ("0:3", "3:6", "6:8")
"""The layers that peers hold by turns, so that what is held twice does not hang on a plan."""
COVERED_S = 120.0
"""How long a trial waits at most until every layer is held twice again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What one strike cost. ``gap_s`` is NaN-free: 0 where the answer failed."""

    kind: str
    sampled: bool
    failed: str | None
    tokens_lost: int
    tokens_repeated: int
    differs: bool
    struck_at: int
    """Tokens of the answer when the strike came."""
    on_route: bool
    gap_s: float
    prefill_s: float
    """Time to the first token of a request whose prompt is the same history, undisturbed."""
    failovers: int
    peers: int
    commit: str
    trees: dict[str, str] = field(default_factory=dict)


def parse() -> argparse.Namespace:
    parser = report.parser_of("bench.sessions.chaos", __doc__)
    parser.add_argument("--kills", type=int, default=50, help="trials of each kind")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--peers", type=int, default=9)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", action="store_true", help="go on with the trials in --out")
    parser.add_argument("--minutes", type=float, help="begin no further trial after so long")
    return parser.parse_args()


class Chaos:
    """One swarm and the strikes on it."""

    def __init__(self, peers: int, seed: int) -> None:
        self._rng = random.Random(seed)
        self._peers = peers
        self._code = report.code()
        self._gib = memory_for(MODEL) / 2**30
        self._spans: dict[str, str] = {}
        self._started_unix_s: dict[str, float] = {}
        self.swarm = LocalSwarm(MODEL, extra=("--threads", "1"))
        for number in range(peers):
            self._start(f"peer{number}", SPANS[number % len(SPANS)])
        self.swarm.wait_serving()

    def _start(self, name: str, span: str) -> None:
        self._spans[name] = span
        self._started_unix_s[name] = time.time()
        self.swarm.start_peer(memory_gib=self._gib, name=name, extra=("--layers", span))

    def living(self) -> list[LocalPeer]:
        return [peer for peer in self.swarm.peers if peer.process.poll() is None]

    def peer_of(self, peer_id: str) -> LocalPeer:
        return next(peer for peer in self.living() if peer.peer_id == peer_id)

    def coordinator(self) -> LocalPeer:
        """The peer that the others name; a random one if that one is gone already."""
        living = self.living()
        for peer in living:
            named = peer.find("coordinator")
            found = [p for p in living if named and p.peer_id == named["peer_id"]]
            if found:
                return found[0]
        return self._rng.choice(living)

    def strike(self, kind: str, route: tuple[str, ...]) -> LocalPeer:
        """Do it, at once; returns the victim."""
        match kind:
            case "coordinator":
                victim = self.coordinator()
            case "bootstrap":
                victim = self.living()[0]
            case _:
                victim = self.peer_of(self._rng.choice(route))
        match kind:
            case "stop":
                victim.signal(signal.SIGSTOP)
            case "black_hole":
                for child in psutil.Process(victim.process.pid).children():
                    child.send_signal(signal.SIGSTOP)
            case _:
                victim.kill()
        return victim

    def repair(self, kind: str, victim: LocalPeer) -> None:
        """Let a stopped victim go on; end what is left of a killed one, and start it again."""
        if kind == "stop":
            victim.signal(signal.SIGCONT)
            return
        if kind == "black_hole":
            for child in psutil.Process(victim.process.pid).children():
                child.send_signal(signal.SIGCONT)
            return
        end_group(victim.process.pid)
        self._start(victim.name, self._spans[victim.name])

    async def covered(self, client: Swarm, *, without: frozenset[str]) -> None:
        """Wait until every layer is held twice by living peers that the DHT shows."""
        until_s = time.monotonic() + COVERED_S
        while time.monotonic() < until_s:
            living = {peer.peer_id for peer in self.living()} - without
            spec = client.view.spec
            # A record of a peer's earlier life outlives it in the DHT.
            records = [
                r
                for p, r in client.view.nodes.items()
                if p in living and r.joined_unix_s > self._started_unix_s[r.name]
            ]
            if spec is not None and all(
                sum(r.holds(n, n + 1) for r in records) >= 2 for n in range(spec.layers)
            ):
                return
            await asyncio.sleep(0.2)
            await client.reader.refresh()
        shown = {r.name: (r.state.value, r.start, r.end) for r in client.view.nodes.values()}
        raise RuntimeError(f"not every layer is held twice after {COVERED_S:.0f} s: {shown}")

    async def trial(
        self, kind: str, number: int, expected: dict[bool, tuple[int, ...]], usual: Swarm
    ) -> Trial:
        """One answer with one strike."""
        sampled = number % 2 == 1
        at = self._rng.randint(8, NEW_TOKENS // 2)
        async with AsyncExitStack() as stack:
            client = usual
            if kind == "bootstrap":
                founder = self.living()[0].address
                client = await stack.enter_async_context(Swarm.connect([founder], model=str(MODEL)))
            await self.covered(client, without=frozenset())
            assert client.text.tokenizer is not None
            history = (*client.text.tokenizer.encode(PROMPT), *expected[sampled][:at])
            plain = await client.generate(history, max_new_tokens=1)
            running = client.begin(PROMPT, options(sampled))
            tokens: list[int] = []
            victim: LocalPeer | None = None
            gap_s, last_s, failed, on_route = 0.0, 0.0, None, False
            try:
                async for piece in running:
                    now_s = time.perf_counter()
                    tokens += piece.token_ids
                    gap_s = max(gap_s, now_s - last_s) if victim is not None else 0.0
                    last_s = now_s
                    if len(tokens) >= at and victim is None:
                        route = tuple(stage.peer_id for stage in running.route)
                        victim = self.strike(kind, route)
                        on_route = victim.peer_id in route
                failovers = running.answer().failovers
            except UnavailableError as error:
                failed, failovers = str(error), 0
            if victim is not None:
                self.repair(kind, victim)
        want = expected[sampled]
        return Trial(
            kind=kind,
            sampled=sampled,
            failed=failed,
            tokens_lost=max(0, len(want) - len(tokens)),
            tokens_repeated=max(0, len(tokens) - len(want)),
            differs=tuple(tokens) != want,
            struck_at=at,
            on_route=on_route,
            gap_s=round(gap_s, 4),
            prefill_s=round(plain.ttft_s, 4),
            failovers=failovers,
            peers=self._peers,
            **self._code,
        )

    async def undisturbed(self) -> dict[bool, tuple[int, ...]]:
        """The answers, greedy and sampled, that every trial must give."""
        async with Swarm.connect(self.swarm.addresses, model=str(MODEL)) as client:
            return {
                sampled: (await client.generate(PROMPT, options(sampled))).token_ids
                for sampled in (False, True)
            }


def options(sampled: bool) -> GenerationOptions:
    """What every answer is asked with."""
    return GenerationOptions(
        max_new_tokens=NEW_TOKENS,
        temperature=0.9 if sampled else 0.0,
        seed=7,
        ignore_eos=True,
    )


def summary(trials: list[Trial]) -> dict[str, Any]:
    """The figures of one kind."""
    gaps = [trial.gap_s for trial in trials if trial.failed is None and trial.on_route]
    prefills = [trial.prefill_s for trial in trials]
    return {
        "trials": len(trials),
        "on_route": sum(trial.on_route for trial in trials),
        "requests_failed": sum(trial.failed is not None for trial in trials),
        "tokens_lost": sum(trial.tokens_lost for trial in trials),
        "tokens_repeated": sum(trial.tokens_repeated for trial in trials),
        "answers_that_differ": sum(trial.differs for trial in trials),
        "gap_p50_s": percentile(gaps, 0.5),
        "gap_p95_s": percentile(gaps, 0.95),
        "gap_max_s": max(gaps, default=0.0),
        "prefill_p50_s": percentile(prefills, 0.5),
        "prefill_max_s": max(prefills, default=0.0),
    }


def write(out: Path | None, arguments: argparse.Namespace, trials: list[Trial]) -> dict[str, Any]:
    """The whole result so far; also as a file where one is asked."""
    result: dict[str, Any] = report.provenance(arguments.seed)
    result["peers"] = sorted({trial.peers for trial in trials})
    result["new_tokens"] = NEW_TOKENS
    for kind in KINDS:
        found = [trial for trial in trials if trial.kind == kind]
        if found:
            result[kind] = summary(found)
    result["trials"] = [asdict(trial) for trial in trials]
    if out is not None:
        report.write(out, result)
    return result


def to_do(arguments: argparse.Namespace, trials: list[Trial]) -> int:
    """How many trials are missing."""
    done = Counter(trial.kind for trial in trials)
    return sum(max(0, arguments.kills - done[kind]) for kind in arguments.kinds)


async def run(arguments: argparse.Namespace, trials: list[Trial], console: Console) -> None:
    """All trials that are still to be done."""
    until_s = time.monotonic() + 60.0 * (arguments.minutes or math.inf)
    chaos = Chaos(arguments.peers, arguments.seed + len(trials))
    with chaos.swarm:
        expected = await chaos.undisturbed()
        async with Swarm.connect(chaos.swarm.addresses, model=str(MODEL)) as client:
            for number in range(arguments.kills):
                for kind in arguments.kinds:
                    if sum(trial.kind == kind for trial in trials) > number:
                        continue
                    if time.monotonic() > until_s:
                        return
                    trial = await chaos.trial(kind, number, expected, client)
                    trials.append(trial)
                    console.print(trial)
                    write(arguments.out, arguments, trials)


def main() -> int:
    arguments = parse()
    console = Console(stderr=True)
    known = report.earlier(arguments.out) if arguments.resume else {}
    trials = [Trial(**each) for each in known.get("trials", ())]
    wanted = arguments.kills * len(arguments.kinds)
    if to_do(arguments, trials):
        asyncio.run(run(arguments, trials, console))
    left = to_do(arguments, trials)
    console.print(f"{left} of {wanted} trials are still to be done" if left else "all are done")
    result = write(arguments.out, arguments, trials)
    del result["trials"]
    Console().print(result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
