"""``python -m bench.stacked_states``: single rows of sessions with states, together and one by one.

A model with convolutions, recurrences and attention decodes some tokens for one and for several
sessions at once, on this machine's CPU, by the same engine, in turns. The ids must be equal.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.report import provenance, write

SEED = 1
FAMILIES = ("qwen3_next", "falcon_h1", "lfm2")
SHAPE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8}
SESSIONS = (1, 8)
PROMPT_TOKENS, NEW_TOKENS, ROUNDS = 24, 24, 3
MEMORY_BYTES = 1 << 30


def decoded(engine: Any, sessions: int) -> tuple[float, list[list[int]]]:
    """Tokens per second of the decode steps, and the ids."""
    from dht.messages.session import Sampling
    from node.engine.engine import WorkItem

    names = [str(number) for number in range(sessions)]
    ids = {name: [(7 * at + int(name)) % 100 for at in range(PROMPT_TOKENS + int(name))]
           for name in names}  # fmt: skip
    done = dict.fromkeys(names, 0)
    for name in names:
        assert engine.kv.reserve(name, len(ids[name]) + NEW_TOKENS) is None
    started_s = 0.0
    for step in range(NEW_TOKENS):
        if step == 1:
            started_s = time.perf_counter()
        items = [
            WorkItem(
                session=name, start=0, end=engine.spec.layers, position=done[name],
                token_ids=tuple(ids[name][done[name] :]), sampling=Sampling(),
            )
            for name in names
        ]  # fmt: skip
        for result in engine.step(items):
            assert result.error is None, result.error
            done[result.item.session] = len(ids[result.item.session])
            ids[result.item.session].append(result.token_id)
    took_s = time.perf_counter() - started_s
    for name in names:
        engine.kv.free(name)
    return sessions * (NEW_TOKENS - 1) / took_s, [ids[name][-NEW_TOKENS:] for name in names]


def measured(family: str) -> dict[str, Any]:
    """Tokens per second by number of sessions, one by one and together."""
    from bench.tiny_families import make
    from node.engine.engine import Engine, EngineConfig
    from node.weights.store import WeightStore

    with tempfile.TemporaryDirectory() as directory:
        make(Path(directory), family, **SHAPE)
        store = WeightStore.open(directory)
        engine = Engine(EngineConfig(store=store, name=family, memory_bytes=MEMORY_BYTES))
        engine.load(0, engine.spec.layers)
        found: dict[str, Any] = {"stacks": engine.loaded.flow.stacks}
        for sessions in SESSIONS:
            speeds: dict[bool, list[float]] = {False: [], True: []}
            answers = []
            for _ in range(ROUNDS):
                for together, seen in speeds.items():
                    engine.loaded.flow.stacks = together
                    speed, ids = decoded(engine, sessions)
                    seen.append(speed)
                    answers.append(ids)
            assert all(ids == answers[0] for ids in answers), "ids differ"
            found[f"{sessions} sessions"] = {
                "one by one": round(statistics.median(speeds[False]), 1),
                "together": round(statistics.median(speeds[True]), 1),
            }
        return found


def main() -> int:
    """Measure, print, and write the result."""
    parser = argparse.ArgumentParser(prog="python -m bench.stacked_states", description=__doc__)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write JSON here")
    arguments = parser.parse_args()
    found = {}
    for family in FAMILIES:
        found[family] = measured(family)
        print(f"{family}: {found[family]}", flush=True)
    if arguments.out is not None:
        shown = {"shape": SHAPE, "tokens_per_s": found, "rounds": ROUNDS}
        write(arguments.out, {**provenance(SEED), **shown})
    return 0


if __name__ == "__main__":
    sys.exit(main())
