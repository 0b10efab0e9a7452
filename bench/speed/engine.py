"""One engine with all layers beside ``transformers`` alone.

All sides take turns in one process, and who begins changes from round to round, because the machine
is shared. A ratio is the median of the rounds' ratios, so that what slows both down does not count;
its quartiles are stated with it. Decode is measured after a prompt of 64 tokens, per token of each
stream, and stated in terms of its floor, too: the bytes of the weights over the memory's measured
bandwidth; and in terms of its products alone, the same matrices in a bare loop, which no engine can
beat. Prefill is one prompt of 512. Requests of mixed lengths run against ``transformers``'
continuous batching, whole requests in and out. ``--processor-time`` gives one thread to each side
and counts what it computes rather than what it waits for, so that others on the machine matter
less.
"""

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from statistics import median, quantiles
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from bench.report import earlier, parser_of, provenance, write
from dht.messages.session import Sampling
from node.engine.engine import Engine, EngineConfig, WorkItem
from node.model.linear.packed_linear import PackedLinear
from node.weights.store import WeightStore
from testing.paths import ROOT
from testing.random_model import make_llama
from testing.reference import Reference, memory_for

SEED = 0
BUNDLED = ROOT / "models" / "brook"
NAMES = {"512x8": (512, 8), "1024x16": (1024, 16)}
"""Hidden width and layers."""
STREAMS = (1, 8)
PROMPT, PREFILL, DECODE = 64, 512, 24
REQUESTS = (8, 32)
"""Numbers of requests of mixed lengths that run at once."""
REQUEST_NEW = 16
PAGE_TOKENS, BATCH_TOKENS = 256, 512
"""Page and batch of continuous batching, in tokens: a request of ours fits a page, and the cache
holds two for each."""
READ_BYTES = 256 << 20
"""Bytes of the tensor whose reading measures the bandwidth."""
ROUNDS = 9
PRODUCT_ROUNDS = 8
GREEDY = Sampling()


class Clock:
    """What seconds are taken from; see ``--processor-time``."""

    now = staticmethod(time.perf_counter)


def prompts_of(streams: int, tokens: int, vocab: int) -> list[list[int]]:
    """Random ids, the same in every run."""
    generator = torch.Generator().manual_seed(SEED)
    ids: list[list[int]] = torch.randint(1, vocab, (streams, tokens), generator=generator).tolist()
    return ids


class EngineSide:
    """The engine, driven as a worker would."""

    def __init__(self, directory: Path) -> None:
        store = WeightStore.open(str(directory))
        memory_bytes = memory_for(directory) + (512 << 20)
        self._engine = Engine(
            EngineConfig(store=store, name=directory.name, memory_bytes=memory_bytes)
        )
        self._engine.load(0, self._engine.spec.layers)

    def run(self, prompts: list[list[int]], new: int) -> tuple[list[list[int]], float, float]:
        """Greedy ids, seconds for the prompts, and seconds for all tokens after the first."""
        for n, prompt in enumerate(prompts):
            assert self._engine.kv.reserve(str(n), len(prompt) + new) is None
        answers: list[list[int]] = [[] for _ in prompts]
        times_s = [Clock.now()]
        for turn in range(new):
            items = [
                WorkItem(
                    session=str(n),
                    start=0,
                    end=self._engine.spec.layers,
                    position=len(prompt) + turn - 1 if turn else 0,
                    token_ids=(answers[n][-1],) if turn else tuple(prompt),
                    sampling=GREEDY,
                )
                for n, prompt in enumerate(prompts)
            ]
            for n, result in enumerate(self._engine.step(items)):
                assert result.token_id is not None, result.error
                answers[n].append(result.token_id)
            times_s.append(Clock.now())
        for n in range(len(prompts)):
            self._engine.kv.free(str(n))
        return answers, times_s[1] - times_s[0], times_s[-1] - times_s[1]

    def serve(self, prompts: list[list[int]], new: int) -> tuple[list[list[int]], float]:
        """Greedy ids of requests of different lengths, and the seconds from first to last."""
        answers, first_s, later_s = self.run(prompts, new)
        return answers, first_s + later_s

    def products_s(self, rows: int) -> float:
        """Least seconds of the products of layers and head for ``rows`` rows."""
        held = self._engine.loaded
        modules = [*held.layers.values(), *held.parts.values()]
        linears = [
            part
            for module in modules
            for part in module.modules()
            if isinstance(part, nn.Linear | PackedLinear)
        ]
        given = {size: torch.randn(rows, size) for size in {part.in_features for part in linears}}

        def through() -> None:
            for part in linears:
                part(given[part.in_features])

        with torch.inference_mode():
            return min(_seconds(through) for _ in range(PRODUCT_ROUNDS))

    @property
    def vocab(self) -> int:
        """How many token ids there are."""
        return self._engine.spec.vocab

    @property
    def weights_bytes(self) -> int:
        """What a decode step reads at least: the layers and the head."""
        spec = self._engine.spec
        return spec.layers * spec.layer_bytes + spec.head_bytes


class ReferenceSide:
    """``generate`` of transformers; the prompt's time is taken from a run of one token."""

    def __init__(self, directory: Path) -> None:
        self._model = Reference.load(directory).model

    def _generate(self, ids: torch.Tensor, new: int) -> tuple[list[list[int]], float]:
        started_s = Clock.now()
        with torch.inference_mode():
            out = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=new,
                pad_token_id=0,
            )
        answers: list[list[int]] = out[:, ids.shape[1] :].tolist()
        return answers, Clock.now() - started_s

    def run(self, prompts: list[list[int]], new: int) -> tuple[list[list[int]], float, float]:
        """As :meth:`EngineSide.run`."""
        ids = torch.tensor(prompts)
        _, first_s = self._generate(ids, 1)
        if new == 1:
            return [], first_s, 0.0
        answers, whole_s = self._generate(ids, new)
        return answers, first_s, whole_s - first_s

    def serve(self, prompts: list[list[int]], new: int) -> tuple[list[list[int]], float]:
        """As :meth:`EngineSide.serve`, by continuous batching with a manager that stays."""
        started_s = Clock.now()
        done = self._model.generate_batch(
            prompts,
            generation_config=GenerationConfig(
                max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0
            ),
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=PAGE_TOKENS,
                num_blocks=2 * max(REQUESTS),
                max_batch_tokens=BATCH_TOKENS,
            ),
            warmup=False,
            persistent_manager=True,  # its start-up falls into the first round
        )
        seconds = Clock.now() - started_s
        ordered = sorted(done.items(), key=lambda pair: int(pair[0].rpartition("_")[2]))
        return [list(output.generated_tokens) for _, output in ordered], seconds


def memory_bytes_per_s() -> float:
    """What a sum over a large tensor reads per second; the best of several."""
    read = torch.zeros(READ_BYTES // 4)
    best_s = min(_seconds(read.sum) for _ in range(7))
    return READ_BYTES / best_s


def _seconds(run: Callable[[], object]) -> float:
    started_s = Clock.now()
    run()
    return Clock.now() - started_s


def mixed(requests: int, vocab: int) -> list[list[int]]:
    """Prompts of 8 to 128 tokens, the same in every run."""
    chance = Random(SEED)
    return [
        [chance.randrange(1, vocab) for _ in range(chance.randint(8, 128))] for _ in range(requests)
    ]


Ran = dict[str, list[float]]
"""Seconds of each round by side."""


def serve_mixed(
    sides: dict[str, EngineSide | ReferenceSide], requests: int, vocab: int, rounds: int
) -> dict[str, Any]:
    """Tokens/s of the answers of requests of mixed lengths that all come at once."""
    prompts = mixed(requests, vocab)
    took, answers = alternate(sides, rounds, lambda side: side.serve(prompts, REQUEST_NEW))
    return {**rated(took, requests * REQUEST_NEW), "same_answers": same(answers)}


def compare(directory: Path, rounds: int) -> dict[str, Any]:
    """Both sides in alternation."""
    engine = EngineSide(directory)
    sides: dict[str, EngineSide | ReferenceSide] = {
        "engine": engine,
        "transformers": ReferenceSide(directory),
    }
    result: dict[str, Any] = {}
    vocab = engine.vocab
    bytes_per_s = memory_bytes_per_s()
    result["memory_bytes_per_s"] = round(bytes_per_s)
    for streams in STREAMS:
        prompts = prompts_of(streams, PROMPT, vocab)

        def decode(
            side: EngineSide | ReferenceSide, prompts: list[list[int]] = prompts
        ) -> tuple[list[list[int]], float]:
            answers, _, decode_s = side.run(prompts, DECODE)
            return answers, decode_s

        took, answers = alternate(sides, rounds, decode)
        step_s = median(took["engine"]) / (DECODE - 1)
        result[f"decode_{streams}"] = {
            **rated(took, streams * (DECODE - 1)),
            "times_floor": round(step_s * bytes_per_s / engine.weights_bytes, 2),
            "times_products": round(step_s / engine.products_s(streams), 2),
            "same_answers": same(answers),
        }
    prompt = prompts_of(1, PREFILL, vocab)
    took, _ = alternate(sides, rounds, lambda side: side.run(prompt, 1)[:2])
    result[f"prefill_{PREFILL}"] = rated(took, PREFILL)
    for requests in REQUESTS:
        result[f"mixed_{requests}"] = serve_mixed(sides, requests, vocab, mixed_rounds(rounds))
    return result


def mixed_rounds(rounds: int) -> int:
    """Requests of mixed lengths take long, and their ratios are far from 1."""
    return max(2, rounds // 3)


def alternate(
    sides: dict[str, EngineSide | ReferenceSide],
    rounds: int,
    run: Callable[[EngineSide | ReferenceSide], tuple[list[list[int]], float]],
) -> tuple[Ran, dict[str, list[list[int]]]]:
    """Each side's seconds by round and its answers; a first round of each warms up."""
    took: Ran = {name: [] for name in sides}
    answers: dict[str, list[list[int]]] = {}
    for turn in range(rounds + 1):
        names = list(sides) if turn % 2 else list(sides)[::-1]
        for name in names:
            answers[name], seconds = run(sides[name])
            if turn:
                took[name].append(seconds)
    return took, answers


def same(answers: dict[str, list[list[int]]]) -> bool:
    """Whether both sides answered the same."""
    return answers["engine"] == answers["transformers"]


def rated(took: Ran, tokens: int) -> dict[str, Any]:
    """Both median rates, and the median of the rounds' ratios with its quartiles."""
    pairs = zip(took["engine"], took["transformers"], strict=True)
    ratios = [other_s / ours_s for ours_s, other_s in pairs]
    low, _, high = quantiles(ratios, n=4, method="inclusive")
    return {
        "unit": "tokens_per_s",
        **{name: round(tokens / median(seconds), 1) for name, seconds in took.items()},
        "ratio": round(median(ratios), 2),
        "ratio_quartiles": [round(low, 2), round(high, 2)],
        "rounds": len(ratios),
    }


def show(model: str, result: dict[str, Any]) -> None:
    """Print what was found of one model."""
    for name, figures in result["models"][model].items():
        print(f"{model} {name}: {figures}", flush=True)


def main() -> int:
    """Measure every shape and print or write the result."""
    parser = parser_of("bench.speed.engine", __doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--model", action="append", choices=[*NAMES, BUNDLED.name], metavar="NAME",
        help="only this one, and keep what --out says of the others; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--processor-time",
        action="store_true",
        help="one thread, and seconds of processor time: for a machine that others use, too",
    )
    arguments = parser.parse_args()
    result: dict[str, Any] = {**provenance(SEED), "rounds": arguments.rounds, "models": {}}
    if arguments.processor_time:
        Clock.now = staticmethod(time.process_time)
        torch.set_num_threads(1)
        result["seconds"] = "processor time, one thread"
    chosen = arguments.model or [*NAMES, BUNDLED.name]
    if arguments.model:
        result["models"] = earlier(arguments.out).get("models", {})
    for name in chosen:
        with tempfile.TemporaryDirectory() as made:
            directory = BUNDLED
            if name in NAMES:
                hidden, layers = NAMES[name]
                directory = make_llama(Path(made), hidden=hidden, layers=layers, seed=SEED)
            result["models"][name] = compare(directory, arguments.rounds)
        show(name, result)
        write(arguments.out, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
