"""What drafts around the ring are worth: tokens/s with and without, between real processes.

    sudo python -m bench.speed.speculation [--out bench/results/speculation.json]

Three stages in network namespaces of their own (:mod:`testing.wan_lab`), with links of 20 and 50 ms
there and back, and a client near all of them.

- ``stand_in``: models of 8 B and 70 B parameters on RTX 3090s in whose place an engine waits as
  long (:mod:`testing.timed_engine`). Its answers are given texts, so that a model that copies,
  edits or extracts is at hand; a token is a word with the space before it, a run of spaces, or a
  sign. Drafts, rows and links are real; what the model would say is not.
- ``brook``: the bundled model as real peers, on the processor, without a draft model. It was
  trained on little stories alone, so it copies nothing; it repeats itself in long answers.
- ``brook_drafter``: its stories with the drafter that is bundled with it, over three and five
  stages.
- ``alone``: the stand-in under a virtual clock, where nothing else takes time, also for layers
  that keep a state; ``full_load``: so many answers at once that steps are full.

Every answer is compared with the one without drafts, token by token.
"""

import argparse
import asyncio
import itertools
import json
import random
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from bench.report import earlier, parser_of, provenance, write
from client import GenerationOptions, Swarm
from coordinator.policies.batching.scheduler import BatchLimits
from dht.command_line import loop_factory
from dht.daemon.transport import HivemindTransport
from dht.identity.peer_id import Identity
from dht.messages.session import SESSION_BOUNDS
from dht.messages.types import ModelSpec
from dht.transport.config import TransportConfig
from dht.transport.interface import Transport
from node.drafting.suffix import SuffixDrafter
from node.engine.model_runner import RUNNER
from node.engine.work_item import WorkItem, WorkResult
from node.links.hops import HopConfig
from node.stage.config import StageConfig
from node.stage.draft_engine import DIRECTORY
from testing.clock import run_virtual
from testing.local_swarm import LocalSwarm
from testing.network import MemoryNetwork
from testing.paths import ROOT
from testing.reference import draft_memory_for, memory_for
from testing.stand_in import (
    PATIENT,
    QWEN_7B,
    SPANS,
    StandInPeer,
    client_of,
    join_client,
    join_peers,
    serving,
)
from testing.timed_engine import GpuTimes, TimedEngine
from testing.wan_lab import Shape, WanLab, why_not


@dataclass(frozen=True, slots=True)
class StandIn:
    """A model and what a stage of it, a third, takes on an RTX 3090."""

    spec: ModelSpec
    times: GpuTimes
    keeps_state: bool = False
    """Whether its layers keep a state: rows of right drafts run again where others were wrong."""


SPEC = replace(QWEN_7B, name="8b-shapes", vocab=1 << 16)
STAND_INS = {
    # A third of 16 GB of fp16 weights at 936 GB/s; a third of 16 GFLOP a token at 71 TFLOP/s.
    "8 B": StandIn(SPEC, GpuTimes(step_s=5.7e-3, decode_s=2e-5, prefill_s=7.5e-5)),
    # A third of 40 GB of 4-bit weights; a third of 140 GFLOP a token.
    "70 B": StandIn(
        replace(SPEC, name="70b-shapes", activation_bytes=8192 * 2),
        GpuTimes(step_s=1.42e-2, decode_s=2e-5, prefill_s=6.6e-4),
    ),
}
STATEFUL = {"8 B with states": replace(STAND_INS["8 B"], keeps_state=True)}
NEAR = Shape(mbit=1000, delay_ms=0.1)
MBIT = 100.0
ROUND_TRIPS_MS = (20.0, 50.0)
CLIENT = len(SPANS)
PARTS = ("stand_in", "brook", "brook_drafter", "on_paper")
ANSWER_TOKENS = 250
END_S = 420.0
LOADED = 64
LOADED_TOKENS = 100
LOADED_KINDS = ("copying", "prose", "random")
BROOK = ROOT / "models" / "brook"
BROOK_SPANS = {3: ("0:3", "3:6", "6:8"), 5: ("0:2", "2:4", "4:5", "5:7", "7:8")}
BROOK_PROMPT = "Once upon a time there was"
BROOK_TOKENS = {"story": 120, "repeating": 400}


def pieces(text: str) -> list[str]:
    """A text as tokens: words with the space before them, runs of spaces, signs."""
    return re.findall(r" ?\w+|\s+|[^\w\s]", text)


def texts() -> dict[str, tuple[str, str]]:
    """Prompt and answer by kind of work."""
    source = (ROOT / "node" / "kv" / "export.py").read_text()[:4000]
    edited = source.replace("KvRows", "LayerRows").replace("position", "begin")
    prose = (ROOT / "docs" / "how-it-works.md").read_text()
    rng = random.Random(3)
    names = ("Ada", "Bo", "Cleo", "Dmitri", "Edda", "Farid", "Greta", "Hugo")
    people = [
        {"name": name, "age": rng.randrange(20, 70), "city": rng.choice(("Oslo", "Lyon", "Kyoto"))}
        for name in names * 3
    ]
    told = "\n".join(f"{p['name']} is {p['age']} and lives in {p['city']}." for p in people)
    return {
        "copying": (f"Repeat this file:\n{source}\n", source),
        "editing": (f"Rename KvRows and position in this file:\n{source}\n", edited),
        "extraction": (f"Give as JSON:\n{told}\n", json.dumps(people, indent=1)),
        "prose": (prose[:1500], prose[1500:4000]),
        "random": ("", ""),
    }


def scripts() -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """Kind, prompt and answer as token ids; a session's seed is its script's index."""
    known: dict[str, int] = {}
    found = []
    for kind, (prompt, answer) in texts().items():
        ids = [
            tuple(known.setdefault(piece, len(known)) for piece in pieces(text))
            for text in (prompt, answer)
        ]
        found.append((kind, ids[0], ids[1][:ANSWER_TOKENS]))
    rng = random.Random(4)
    noise = tuple(rng.randrange(SPEC.vocab) for _ in range(400 + ANSWER_TOKENS))
    found[-1] = ("random", noise[:400], noise[400:])
    return found


SCRIPTS = scripts()


class ScriptedEngine(TimedEngine):
    """Says the script that the session's seed names."""

    def _result(self, item: WorkItem) -> WorkResult:
        result = super()._result(item)
        if item.sampling is None or not result.token_ids:
            return result
        _, prompt, answer = SCRIPTS[item.sampling.seed % len(SCRIPTS)]
        at = item.position + item.tokens - len(item.drafts) - len(prompt)
        run = [answer[at % len(answer)]]
        for number, draft in enumerate(item.drafts, start=1):
            if draft != run[-1]:
                break
            run.append(answer[(at + number) % len(answer)])
        return replace(result, token_ids=tuple(run))


def accepted_by_place() -> dict[str, list[float]]:
    """Share of drafts that are right where all before them are, by their place in the draft."""
    found = {}
    for kind, prompt, answer in SCRIPTS:
        drafter = SuffixDrafter()
        drafter.extend(prompt)
        tried, right = [0] * SESSION_BOUNDS.draft_tokens_max, [0] * SESSION_BOUNDS.draft_tokens_max
        for at, token_id in enumerate(answer):
            draft = drafter.propose(SESSION_BOUNDS.draft_tokens_max).token_ids
            for place, (told, came) in enumerate(zip(draft, answer[at:], strict=False)):
                tried[place] += 1
                right[place] += told == came
                if told != came:
                    break
            drafter.extend((token_id,))
        shares = zip(right, tried, strict=True)
        found[kind] = [round(ok / n, 3) if n else 0.0 for ok, n in shares]
    return found


class StatefulEngine(ScriptedEngine):
    """The same for layers that keep a state (:class:`node.kv.session_state.SessionState`)."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._known: dict[str, tuple[int, int]] = {}
        """Where each session's state is known: before its newest step's rows, and behind them."""

    def _more_s(self, batch: Sequence[WorkItem]) -> float:
        apart_s, again = 0.0, 0
        for item in batch:
            first, last = self._known.get(item.session, (0, 0))
            rows = item.position - first if first < item.position < last else 0
            if 0 < rows <= RUNNER.again_rows_max:
                again += rows
            else:
                apart_s += self._times.of(0, rows) if rows else 0.0
                first = item.position
            self._known[item.session] = first, item.position + item.tokens
        return apart_s + again * self._times.prefill_s


async def stage_on(transport: Transport, number: int, model: StandIn) -> StandInPeer:
    """Serve a stage of a stand-in model."""
    config = StageConfig(idle_s=600.0, hops=HopConfig(watch=PATIENT))
    limits = BatchLimits(prefill_tokens_max=256)
    return await serving(
        transport,
        SPANS[number],
        model.spec,
        model.times,
        limits,
        config,
        engine_class=StatefulEngine if model.keeps_state else ScriptedEngine,
    )


async def transport_on(host: str, peers: tuple[str, ...]) -> HivemindTransport:
    """A peer's daemon that listens on ``host`` and knows ``peers``."""
    return await HivemindTransport.create(
        TransportConfig(identity=Identity.generate(), host=host, initial_peers=peers)
    )


async def run_stage(number: int, host: str, peers: tuple[str, ...], size: str) -> None:
    """Print this stage's address and serve until stdin closes."""
    transport = await transport_on(host, peers)
    await stage_on(transport, number, STAND_INS[size])
    print(transport.addresses[0], flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await transport.close()


async def compared(
    client: Swarm, prompt: str | tuple[int, ...], options: GenerationOptions
) -> dict[str, Any]:
    """Tokens/s behind the first token with and without drafts, and whether all tokens agree."""
    plain, drafted = [
        await client.generate(prompt, replace(options, speculate=each)) for each in (False, True)
    ]
    return {
        "tokens": len(plain.token_ids),
        "plain_tokens_per_s": round(1.0 / plain.tpot_s, 2),
        "drafted_tokens_per_s": round(1.0 / drafted.tpot_s, 2),
        "gain": round(plain.tpot_s / drafted.tpot_s, 3),
        "identical": plain.token_ids == drafted.token_ids,
    }


async def run_client(host: str, peers: tuple[str, ...], size: str) -> dict[str, Any]:
    """Ask for all scripts, one after the other."""
    rows = {}
    async with client_of(await transport_on(host, peers), STAND_INS[size].spec) as client:
        # The first answer opens the links between the stages; it is not counted.
        await client.generate((1, 2, 3), max_new_tokens=4, ignore_eos=True)
        for seed, (kind, prompt, answer) in enumerate(SCRIPTS):
            options = GenerationOptions(max_new_tokens=len(answer), seed=seed, ignore_eos=True)
            rows[kind] = await compared(client, prompt, options)
    return rows


async def run_brook(peers: tuple[str, ...], kinds: Sequence[str]) -> dict[str, Any]:
    """Ask the real model, greedily and sampled."""
    rows = {}
    async with Swarm.connect(peers, model=str(BROOK)) as client:
        await client.generate(BROOK_PROMPT, max_new_tokens=4)
        for kind in kinds:
            tokens = BROOK_TOKENS[kind]
            for temperature in (0.0, 0.8):
                options = GenerationOptions(
                    max_new_tokens=tokens, temperature=temperature, seed=7, ignore_eos=True
                )
                name = f"{kind}, {'sampled' if temperature else 'greedy'}"
                rows[name] = await compared(client, BROOK_PROMPT, options)
    return rows


def _command(host: str, peers: Sequence[str], stage: int | str, size: str = "") -> list[str]:
    job = {"host": host, "peers": list(peers), "stage": stage, "size": size}
    return [sys.executable, "-m", "bench.speed.speculation", "--job", json.dumps(job)]


def stages(lab: WanLab, size: str) -> AbstractContextManager[list[str]]:
    """The stand-in stages, each on its host; gives their addresses."""
    return lab.stages(
        len(SPANS), lambda number, before: _command(lab.address(number), before, number, size)
    )


@contextmanager
def brook_peers(lab: WanLab, spans: Sequence[str], *, drafter: bool) -> Iterator[list[str]]:
    """Real peers of the bundled model, each on its host; yields their addresses."""
    extra = ("--threads", "1", "--draft", str(BROOK / DIRECTORY) if drafter else "none")
    memory_bytes = memory_for(BROOK) + draft_memory_for(BROOK)
    with LocalSwarm(BROOK, extra=extra) as swarm:
        for number, span in enumerate(spans):
            swarm.start_peer(
                memory_gib=memory_bytes / 2**30,
                host=lab.address(number),
                run_on=lab.command(number, []),
                extra=("--layers", span),
            )
            swarm.peers[-1].wait_for("listening")
        swarm.wait_serving()
        yield swarm.addresses


@contextmanager
def linked(stages: int, round_trip_ms: float) -> Iterator[WanLab]:
    """A lab with links of one round trip between the hosts of stages; the client's comes last."""
    with WanLab(stages + 1, NEAR) as lab:
        link = Shape(mbit=MBIT, delay_ms=round_trip_ms / 2)
        for one, other in itertools.permutations(range(stages), 2):
            lab.shape(one, other, link)
        yield lab


def asked(lab: WanLab, client: int, peers: list[str], model: str, size: str = "") -> dict[str, Any]:
    """What the client on its host finds."""
    command = _command(lab.address(client), peers, model, size)
    found: dict[str, Any] = json.loads(lab.output(client, command, END_S))
    return found


def of_stand_in(size: str, round_trip_ms: float) -> dict[str, Any]:
    """All texts over links of one round trip."""
    with linked(len(SPANS), round_trip_ms) as lab, stages(lab, size) as addresses:
        return asked(lab, CLIENT, addresses, "stand_in", size)


def of_brook(round_trip_ms: float) -> dict[str, Any]:
    """The bundled model's answers without a drafter."""
    with (
        linked(len(SPANS), round_trip_ms) as lab,
        brook_peers(lab, BROOK_SPANS[len(SPANS)], drafter=False) as addresses,
    ):
        return asked(lab, CLIENT, addresses, "brook")


def with_drafter(count: int, round_trip_ms: float) -> dict[str, Any]:
    """Brook's stories with its drafter, over ``count`` stages."""
    with (
        linked(count, round_trip_ms) as lab,
        brook_peers(lab, BROOK_SPANS[count], drafter=True) as addresses,
    ):
        return asked(lab, count, addresses, "story")


def on_paper(
    kind: int, model: StandIn, count: int, tokens: int, mbit: float, delay_s: float
) -> dict[str, float]:
    """Tokens/s of ``count`` answers at once with and without drafts, under a virtual clock."""

    async def run(*, speculate: bool) -> float:
        network = MemoryNetwork(random.Random(1))
        peers = [
            await stage_on(network.transport(Identity(network.rng.randbytes(32))), number, model)
            for number in range(len(SPANS))
        ]
        join_peers(network, peers, mbit, delay_s)
        transport = network.transport(Identity(network.rng.randbytes(32)))
        join_client(network, transport.peer_id, peers, 0.001)
        async with client_of(transport, model.spec) as client:
            loop = asyncio.get_running_loop()
            options = GenerationOptions(
                max_new_tokens=tokens, seed=kind, ignore_eos=True, speculate=speculate
            )
            began_s = loop.time()
            asked = (client.generate(SCRIPTS[kind][1], options) for _ in range(count))
            answers = await asyncio.gather(*asked)
            took_s = loop.time() - began_s
        for peer in peers:
            await peer.close()
        return 1.0 / answers[0].tpot_s if count == 1 else count * tokens / took_s

    plain, drafted = (run_virtual(run(speculate=each), limit_s=100_000) for each in (False, True))
    return {
        "plain_tokens_per_s": round(plain, 1),
        "drafted_tokens_per_s": round(drafted, 1),
        "gain": round(drafted / plain, 3),
    }


def setting(what: str, round_trip_ms: float) -> str:
    """A row's name."""
    return ", ".join(part for part in (what, f"{round_trip_ms:.0f} ms") if part)


def alone() -> dict[str, Any]:
    """One answer at a time over the links of the real processes, by model, round trip and text."""
    return {
        setting(size, each): {
            name: on_paper(kind, model, 1, min(ANSWER_TOKENS, len(answer)), MBIT, each / 2e3)
            for kind, (name, _, answer) in enumerate(SCRIPTS)
        }
        for size, model in (STAND_INS | STATEFUL).items()
        for each in ROUND_TRIPS_MS
    }


def full_load() -> dict[str, Any]:
    """Many answers at once, by text. Rows are small, so that processors alone are full."""
    model = replace(STAND_INS["8 B"], spec=replace(SPEC, activation_bytes=64))
    rows = {
        name: on_paper(kind, model, LOADED, LOADED_TOKENS, 10 * MBIT, 0.01)
        for kind, (name, _, _) in enumerate(SCRIPTS)
        if name in LOADED_KINDS
    }
    return {"answers": LOADED, **rows}


def _run_job(text: str) -> None:
    job = json.loads(text)
    peers = tuple(job["peers"])
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        match job["stage"]:
            case "stand_in":
                print(json.dumps(runner.run(run_client(job["host"], peers, job["size"]))))
            case "brook":
                print(json.dumps(runner.run(run_brook(peers, tuple(BROOK_TOKENS)))))
            case "story":
                print(json.dumps(runner.run(run_brook(peers, ("story",)))))
            case number:
                runner.run(run_stage(number, job["host"], peers, job["size"]))


def main() -> None:
    parser = parser_of("bench.speed.speculation", __doc__)
    parser.add_argument("--only", choices=PARTS, help="measure this part alone")
    few = "brook's drafter over so many stages alone"
    parser.add_argument("--stages", type=int, choices=BROOK_SPANS, help=few)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.job:
        _run_job(arguments.job)
        return
    if (reason := why_not()) is not None and arguments.only != "on_paper":
        raise SystemExit(f"error: {reason}")
    result: dict[str, Any] = provenance(seed=1)
    if arguments.only:
        result = {**earlier(arguments.out), **result}
    result["accepted_by_place"] = accepted_by_place()
    if arguments.only in {None, "stand_in"}:
        result["stand_in"] = {
            setting(size, each): of_stand_in(size, each)
            for size in STAND_INS
            for each in ROUND_TRIPS_MS
        }
        print(json.dumps(result["stand_in"], indent=1), flush=True)
    if arguments.only in {None, "brook"}:
        result["brook"] = {setting("", each): of_brook(each) for each in ROUND_TRIPS_MS}
        print(json.dumps(result["brook"], indent=1), flush=True)
    if arguments.only in {None, "brook_drafter"}:
        counts = BROOK_SPANS if arguments.stages is None else (arguments.stages,)
        result["brook_drafter"] = result.get("brook_drafter", {}) | {
            setting(f"{count} stages", each): with_drafter(count, each)
            for count in counts
            for each in ROUND_TRIPS_MS
        }
        print(json.dumps(result["brook_drafter"], indent=1), flush=True)
    if arguments.only in {None, "on_paper"}:
        result["alone"], result["full_load"] = alone(), full_load()
        print(json.dumps([result["alone"], result["full_load"]], indent=1))
    write(arguments.out, result)


if __name__ == "__main__":
    main()
