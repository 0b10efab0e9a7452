"""What a draft model is worth: brook's stories with the drafter that is bundled with it, on paper.

    python -m bench.speed.draft_model [--out bench/results/draft_model.json]

The tokens are brook's own answers, and its drafter's drafts are really drawn; time is not. Under a
virtual clock, stages take what a model of 8 B parameters takes on RTX 3090s, a drafted token 3 ms,
as one of 0.6 B parameters would beside it, and links 20 or 50 ms there and back. So the figures
hold the acceptance and the decisions, and nothing of this machine's speed. Every answer is compared
with the one without drafts, token by token.
"""

import itertools
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.report import parser_of, provenance, write
from bench.speed.speculation import MBIT, SPEC
from client import GenerationOptions
from client.text.tokenizer import Tokenizer
from coordinator.policies.batching.scheduler import BatchLimits
from dht.identity.peer_id import Identity
from dht.messages.session import Sampling
from node.drafting.chain import DraftChain
from node.engine.engine import Engine, EngineConfig
from node.engine.work_item import WorkItem, WorkResult
from node.links.hops import HopConfig
from node.stage.config import StageConfig
from node.stage.draft_engine import DIRECTORY, DraftEngine
from node.weights.store import WeightStore
from testing.clock import run_virtual
from testing.local_swarm import ROOT
from testing.network import MemoryNetwork
from testing.stand_in import PATIENT, StandInPeer, client_of, join_client, join_peers, serving
from testing.timed_engine import GpuTimes, TimedEngine

BROOK = ROOT / "models" / "brook"
WHOLE_STEP_S = 17.1e-3
"""Time in which a step reads 16 GB of fp16 weights at 936 GB/s, all stages together."""
TOKEN_S = 3e-3
"""Time in which the draft model draws a token."""
STAGES = (3, 5)
ROUND_TRIPS_MS = (20.0, 50.0)
PROMPTS = ("Once upon a time there was", "One rainy morning,")
ANSWER_TOKENS = 100
TEMPERATURES = {"greedy": 0.0, "sampled": 0.8}
MEMORY_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """A prompt and brook's answer to it, as token ids."""

    kind: str
    temperature: float
    prompt: tuple[int, ...]
    answer: tuple[int, ...]


def engine_of(directory: Path) -> Engine:
    """A whole model on this machine's processor."""
    store = WeightStore.open(str(directory))
    engine = Engine(EngineConfig(store=store, name=directory.name, memory_bytes=MEMORY_BYTES))
    engine.load(0, engine.spec.layers)
    return engine


def answer_of(engine: Engine, prompt: Sequence[int], sampling: Sampling) -> tuple[int, ...]:
    """What plain decoding draws behind ``prompt``."""
    engine.kv.reserve("s", len(prompt) + ANSWER_TOKENS)
    told, position, ids = list(prompt), 0, tuple(prompt)
    for _ in range(ANSWER_TOKENS):
        item = WorkItem(
            session="s",
            start=0,
            end=engine.spec.layers,
            position=position,
            token_ids=ids,
            sampling=sampling,
        )
        (result,) = engine.step([item])
        position, ids = len(told), result.token_ids
        told += result.token_ids
    engine.kv.free("s")
    return tuple(told[len(prompt) :])


def stories() -> list[Story]:
    """Brook's answers; a story's index is the seed that it was sampled with."""
    engine, tokenizer = engine_of(BROOK), Tokenizer.load(BROOK)
    assert tokenizer is not None
    found: list[Story] = []
    for kind, temperature in TEMPERATURES.items():
        for text in PROMPTS:
            prompt = tuple(tokenizer.encode(text))
            sampling = Sampling(temperature=temperature, seed=len(found))
            answer = answer_of(engine, prompt, sampling)
            found.append(Story(kind=kind, temperature=temperature, prompt=prompt, answer=answer))
    return found


def teller_of(told: Sequence[Story]) -> type[TimedEngine]:
    """An engine that says the story that a session's seed names."""

    class Teller(TimedEngine):
        def _result(self, item: WorkItem) -> WorkResult:
            result = super()._result(item)
            if item.sampling is None or not result.token_ids:
                return result
            story = told[item.sampling.seed]
            at = item.position + item.tokens - len(item.drafts) - len(story.prompt)
            run = [story.answer[at]]
            for number, draft in enumerate(item.drafts, start=1):
                if draft != run[-1]:
                    break
                run.append(story.answer[(at + number) % len(story.answer)])
            return replace(result, token_ids=tuple(run))

    return Teller


class TimedDrafts(DraftEngine):
    """Draws what the draft model draws; each step takes ``TOKEN_S`` of the loop's time."""

    def draw(self, chain: DraftChain, told: Callable[[], None]) -> None:
        self._loop.call_later(TOKEN_S, self._later, chain, told)

    def _later(self, chain: DraftChain, told: Callable[[], None]) -> None:
        if chain.goes_on:
            self._step(chain)
            chain.spent_s += TOKEN_S
            if chain.goes_on:
                if len(chain.drawn) == chain.wakes_at:
                    told()
                self.draw(chain, told)
                return
        chain.running = False
        told()


def on_paper(
    told: Sequence[Story], engine: Engine, stages: int, round_trip_ms: float
) -> dict[str, Any]:
    """Tokens/s with and without drafts by kind of story, one answer at a time."""
    times = GpuTimes(step_s=WHOLE_STEP_S / stages, decode_s=2e-5, prefill_s=2.25e-4 / stages)
    cuts = [SPEC.layers * number // stages for number in range(stages + 1)]

    async def run(seed: int, *, speculate: bool) -> tuple[float, tuple[int, ...], float]:
        network = MemoryNetwork(random.Random(1))
        drafts = TimedDrafts(engine, engine.spec.vocab, held=True)
        config = StageConfig(idle_s=600.0, hops=HopConfig(watch=PATIENT), draft_model=drafts)
        limits = BatchLimits(prefill_tokens_max=256)
        peers: list[StandInPeer] = []
        for span in itertools.pairwise(cuts):
            transport = network.transport(Identity(network.rng.randbytes(32)))
            peers.append(
                await serving(
                    transport, span, SPEC, times, limits, config, engine_class=teller_of(told)
                )
            )
        join_peers(network, peers, MBIT, round_trip_ms / 2e3)
        transport = network.transport(Identity(network.rng.randbytes(32)))
        join_client(network, transport.peer_id, peers, 0.001)
        story = told[seed]
        async with client_of(transport, SPEC) as client:
            options = GenerationOptions(
                max_new_tokens=len(story.answer),
                temperature=story.temperature,
                seed=seed,
                ignore_eos=True,
                speculate=speculate,
            )
            answer = await client.generate(story.prompt, options)
        counts = peers[0].stage.counters
        accepted = counts["accepted_by_model"] / max(1, counts["drafted_by_model"])
        for peer in peers:
            await peer.close()
        return answer.tpot_s, answer.token_ids, accepted

    rows = {}
    for kind in TEMPERATURES:
        seeds = [seed for seed, story in enumerate(told) if story.kind == kind]
        plain, drafted = (
            [run_virtual(run(seed, speculate=each), limit_s=100_000) for seed in seeds]
            for each in (False, True)
        )
        plain_s, drafted_s = (sum(tpot_s for tpot_s, _, _ in each) for each in (plain, drafted))
        rows[f"story, {kind}"] = {
            "plain_tokens_per_s": round(len(seeds) / plain_s, 2),
            "drafted_tokens_per_s": round(len(seeds) / drafted_s, 2),
            "gain": round(plain_s / drafted_s, 3),
            "accepted": round(sum(share for _, _, share in drafted) / len(seeds), 3),
            "identical": [ids for _, ids, _ in plain] == [ids for _, ids, _ in drafted],
        }
    return rows


def main() -> None:
    parser = parser_of("bench.speed.draft_model", __doc__)
    arguments = parser.parse_args()
    told, engine = stories(), engine_of(BROOK / DIRECTORY)
    result: dict[str, Any] = provenance(seed=1)
    for stages in STAGES:
        for round_trip_ms in ROUND_TRIPS_MS:
            name = f"{stages} stages, {round_trip_ms:.0f} ms"
            result.setdefault("on_paper", {})[name] = on_paper(told, engine, stages, round_trip_ms)
            print(name, json.dumps(result["on_paper"][name], indent=1), flush=True)
    write(arguments.out, result)


if __name__ == "__main__":
    main()
