"""``python -m bench.engine``: one engine with all layers beside ``transformers`` alone.

Both sides take turns in one process and the medians count, because the machine is shared. Decode
is measured after a prompt of 64 tokens, per token of each stream; prefill is one prompt of 512.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bench.random_model import make_llama
from bench.reference import Reference, memory_for
from bench.report import provenance, write
from dht.messages import Sampling
from node.engine import Engine, EngineConfig, WorkItem
from node.weights import WeightStore

SEED = 0
SHAPES = ((512, 8), (1024, 16))
"""Hidden width and layers."""
STREAMS = (1, 8)
PROMPT, PREFILL, DECODE = 64, 512, 24
ROUNDS = 5
GREEDY = Sampling()


def prompts_of(streams: int, tokens: int) -> list[list[int]]:
    """Random ids, the same in every run."""
    generator = torch.Generator().manual_seed(SEED)
    ids: list[list[int]] = torch.randint(1, 8000, (streams, tokens), generator=generator).tolist()
    return ids


class EngineSide:
    """The engine, driven as a worker would."""

    def __init__(self, directory: Path) -> None:
        store = WeightStore.open(str(directory))
        memory_bytes = memory_for(directory) + (256 << 20)
        self._engine = Engine(
            EngineConfig(store=store, name=directory.name, memory_bytes=memory_bytes)
        )
        self._engine.load(0, self._engine.spec.layers)

    def _step(self, at: int, rows: list[list[int]]) -> list[int]:
        items = [
            WorkItem(
                session=str(n),
                start=0,
                end=self._engine.spec.layers,
                position=at,
                token_ids=tuple(ids),
                sampling=GREEDY,
            )
            for n, ids in enumerate(rows)
        ]
        return [result.token_id or 0 for result in self._engine.step(items)]

    def run(self, prompts: list[list[int]], new: int) -> tuple[list[list[int]], float, float]:
        """Greedy ids, seconds for the prompts, and seconds for all tokens after the first."""
        prompt = len(prompts[0])
        for n in range(len(prompts)):
            assert self._engine.reserve(str(n), prompt + new) is None
        started_s = time.perf_counter()
        columns = [self._step(0, prompts)]
        first_s = time.perf_counter()
        for position in range(prompt, prompt + new - 1):
            columns.append(self._step(position, [[token] for token in columns[-1]]))
        ended_s = time.perf_counter()
        for n in range(len(prompts)):
            self._engine.free(str(n))
        answers = [list(row) for row in zip(*columns, strict=True)]
        return answers, first_s - started_s, ended_s - first_s


class ReferenceSide:
    """``generate`` of transformers; the prompt's time is taken from a run of one token."""

    def __init__(self, directory: Path) -> None:
        self._model = Reference.load(directory).model

    def _generate(self, ids: torch.Tensor, new: int) -> tuple[list[list[int]], float]:
        started_s = time.perf_counter()
        with torch.inference_mode():
            out = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=new,
                pad_token_id=0,
            )
        answers: list[list[int]] = out[:, ids.shape[1] :].tolist()
        return answers, time.perf_counter() - started_s

    def run(self, prompts: list[list[int]], new: int) -> tuple[list[list[int]], float, float]:
        """As :meth:`EngineSide.run`."""
        ids = torch.tensor(prompts)
        _, first_s = self._generate(ids, 1)
        if new == 1:
            return [], first_s, 0.0
        answers, whole_s = self._generate(ids, new)
        return answers, first_s, whole_s - first_s


def compare(directory: Path, rounds: int) -> dict[str, Any]:
    """Medians of both sides, in alternation."""
    sides: dict[str, EngineSide | ReferenceSide] = {
        "engine": EngineSide(directory),
        "transformers": ReferenceSide(directory),
    }
    result: dict[str, Any] = {}
    for streams in STREAMS:
        prompts = prompts_of(streams, PROMPT)
        seconds, answers = alternate(sides, prompts, DECODE, rounds, lambda ran: ran[2])
        rates = {side: streams * (DECODE - 1) / s for side, s in seconds.items()}
        same = answers["engine"] == answers["transformers"]
        result[f"decode_{streams}"] = {
            "unit": "tokens_per_s", **rated(rates), "same_answers": same
        }  # fmt: skip
    seconds, _ = alternate(sides, prompts_of(1, PREFILL), 1, rounds, lambda ran: ran[1])
    rates = {side: PREFILL / s for side, s in seconds.items()}
    result[f"prefill_{PREFILL}"] = {"unit": "tokens_per_s", **rated(rates)}
    return result


def alternate(
    sides: dict[str, EngineSide | ReferenceSide],
    prompts: list[list[int]],
    new: int,
    rounds: int,
    pick: Callable[[tuple[list[list[int]], float, float]], float],
) -> tuple[dict[str, float], dict[str, list[list[int]]]]:
    """Each side's median seconds and its answers; a first round of each warms up."""
    took: dict[str, list[float]] = {name: [] for name in sides}
    answers: dict[str, list[list[int]]] = {}
    for turn in range(rounds + 1):
        for name, side in sides.items():
            ran = side.run(prompts, new)
            answers[name] = ran[0]
            if turn:
                took[name].append(pick(ran))
    return {name: median(seconds) for name, seconds in took.items()}, answers


def rated(rates: dict[str, float]) -> dict[str, float]:
    """Both rates and the engine's in terms of the other's."""
    ratio = rates["engine"] / rates["transformers"]
    return {**{name: round(rate, 1) for name, rate in rates.items()}, "ratio": round(ratio, 2)}


def main() -> int:
    """Measure every shape and print or write the result."""
    parser = argparse.ArgumentParser(prog="python -m bench.engine", description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--small", action="store_true", help="only the smaller model")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write JSON here")
    arguments = parser.parse_args()
    result: dict[str, Any] = {**provenance(SEED), "rounds": arguments.rounds, "models": {}}
    for hidden, layers in SHAPES[:1] if arguments.small else SHAPES:
        with tempfile.TemporaryDirectory() as made:
            directory = make_llama(Path(made), hidden=hidden, layers=layers, seed=SEED)
            found = compare(directory, arguments.rounds)
        result["models"][f"{hidden}x{layers}"] = found
        for name, figures in found.items():
            print(f"{hidden}x{layers} {name}: {figures}", flush=True)
    if arguments.out is not None:
        write(arguments.out, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
