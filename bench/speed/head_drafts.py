"""What a head at the last stage is worth at best, beside the draft model: on paper.

    python -m bench.speed.head_drafts [--out bench/results/head_drafts.json]

The setting is that of :mod:`bench.speed.draft_model`. The last stage's engine knows its answer, and
foretells its next tokens at no cost, as many as a head drafts (:mod:`node.drafting.head_pace`),
each right with a given chance. So a real head, which takes time and is trained, earns less than the
row of the share that it has right.
"""

import itertools
import random
from dataclasses import replace
from typing import Any

from bench.report import parser_of, provenance, write
from bench.speed.draft_model import ANSWER_TOKENS, ROUND_TRIPS_MS, STAGES, WHOLE_STEP_S
from bench.speed.speculation import MBIT, SPEC
from client import GenerationOptions
from coordinator.policies.batching.scheduler import BatchLimits
from dht.identity.peer_id import Identity
from node.drafting.head_pace import HeadPace
from node.engine.work_item import WorkItem, WorkResult
from node.links.hops import HopConfig
from node.stage.config import StageConfig
from testing.clock import run_virtual
from testing.network import MemoryNetwork
from testing.stand_in import PATIENT, client_of, join_client, join_peers, serving
from testing.timed_engine import GpuTimes, TimedEngine

RIGHT = (1.0, 0.9, 0.8, 0.7)
ANSWER = random.Random(5).choices(range(2, 900), k=ANSWER_TOKENS)
PROMPT = tuple(range(2, 8))


def teller_of(right: float) -> type[TimedEngine]:
    """An engine that says the answer, and foretells what comes, ``right`` of it right."""
    chance = random.Random(7)

    class Teller(TimedEngine):
        pace = HeadPace()

        def _result(self, item: WorkItem) -> WorkResult:
            result = super()._result(item)
            if item.sampling is None or not result.token_ids:
                return result
            at = item.position + item.tokens - len(item.drafts) - len(PROMPT)
            run = [ANSWER[at % ANSWER_TOKENS]]
            for number, draft in enumerate(item.drafts, start=1):
                if draft != run[-1]:
                    break
                run.append(ANSWER[(at + number) % ANSWER_TOKENS])
            self.pace.came(run)
            told = tuple(
                ANSWER[(at + len(run) + number) % ANSWER_TOKENS] if chance.random() < right else 1
                for number in range(self.pace.count)
            )
            self.pace.told(told)
            return replace(result, token_ids=tuple(run), foretold=told if item.foretells else ())

    return Teller


def token_s(stages: int, round_trip_ms: float, right: float | None) -> float:
    """Seconds per token with a head that has ``right`` of its drafts right; None: no drafts."""
    times = GpuTimes(step_s=WHOLE_STEP_S / stages, decode_s=2e-5, prefill_s=2.25e-4 / stages)
    cuts = [SPEC.layers * number // stages for number in range(stages + 1)]

    async def run() -> float:
        network = MemoryNetwork(random.Random(1))
        config = StageConfig(idle_s=600.0, hops=HopConfig(watch=PATIENT))
        limits = BatchLimits(prefill_tokens_max=256)
        peers = []
        for span in itertools.pairwise(cuts):
            transport = network.transport(Identity(network.rng.randbytes(32)))
            teller = teller_of(right or 0.0)
            peers.append(
                await serving(transport, span, SPEC, times, limits, config, engine_class=teller)
            )
        join_peers(network, peers, MBIT, round_trip_ms / 2e3)
        transport = network.transport(Identity(network.rng.randbytes(32)))
        join_client(network, transport.peer_id, peers, 0.001)
        async with client_of(transport, SPEC) as client:
            options = GenerationOptions(
                max_new_tokens=ANSWER_TOKENS, ignore_eos=True, speculate=right is not None
            )
            answer = await client.generate(PROMPT, options)
        assert list(answer.token_ids) == ANSWER
        for peer in peers:
            await peer.close()
        return answer.tpot_s

    return run_virtual(run(), limit_s=100_000)


def main() -> None:
    arguments = parser_of("bench.speed.head_drafts", __doc__).parse_args()
    result: dict[str, Any] = provenance(seed=5)
    for stages, round_trip_ms in itertools.product(STAGES, ROUND_TRIPS_MS):
        plain_s = token_s(stages, round_trip_ms, None)
        row = {str(each): plain_s / token_s(stages, round_trip_ms, each) for each in RIGHT}
        name = f"{stages} stages, {round_trip_ms:.0f} ms"
        result.setdefault("gain", {})[name] = {k: round(v, 2) for k, v in row.items()}
        print(name, result["gain"][name], flush=True)
    write(arguments.out, result)


if __name__ == "__main__":
    main()
