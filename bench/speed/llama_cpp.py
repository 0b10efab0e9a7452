"""One GGUF file, computed by this engine and by llama.cpp.

On the processor, alone, with all cores: a prompt of 512 tokens in one step, and steps that decode
one, four and eight rows. Both read the same file of random weights, in processes that take turns.
llama.cpp is the one that ``pip install llama-cpp-python`` builds from its source package; where it
cannot be imported, its rows say so.
"""

import argparse
import ctypes
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

from bench import report
from bench.gpu.engine_gpu import llama, make_layers
from bench.speed.real_sizes import (
    CONTEXT_TOKENS,
    LONG_PROMPT,
    SEED,
    SIZES,
    STEPS,
    STREAMS,
    WARM_STEPS,
    Size,
    decode_s,
    sessions,
    step_s,
)
from node.engine.engine import Engine, EngineConfig
from node.weights.store import WeightStore
from testing.gguf_files import of_kind, write_gguf
from testing.paths import ROOT

KINDS = ("BF16", "Q8_0", "Q4_K")
PROMPTS = 3
"""Prompts behind one that warms up."""
TOKEN_IDS = tuple(1 + at % 255 for at in range(LONG_PROMPT))
STATED = {
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "expert_feed_forward_length": "moe_intermediate_size",
}
"""What llama.cpp wants to be told, and transformers' names for it."""
LENT_BYTES = 16 << 30
COMPUTED_BY = ("anabranch", "llama.cpp")
MODELS = {
    "Llama-3.2-1B": SIZES["Llama-3.2-1B"],
    "Qwen3-30B-A3B": replace(SIZES["Qwen3-30B-A3B"], layers=2),
    "tiny": replace(SIZES["tiny"], shape=llama(256, 256, 4, 2)),
}
Figures = dict[str, Any]


def parse() -> argparse.Namespace:
    parser = report.parser_of("bench.speed.llama_cpp", __doc__)
    named = [name for name in MODELS if name != "tiny"]
    parser.add_argument("--models", nargs="+", choices=MODELS, default=named, metavar="NAME")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, metavar="KIND")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--child", nargs=2, metavar=("BY", "FILE"), help=argparse.SUPPRESS)
    return parser.parse_args()


def ours(file: Path) -> Figures:
    """Seconds of this engine's steps."""
    store = WeightStore.open(str(file))
    engine = Engine(
        EngineConfig(
            store=store,
            name="file",
            dtype="bfloat16",
            memory_bytes=LENT_BYTES,
            threads=os.cpu_count(),
        )
    )
    engine.load(0, engine.spec.layers)

    def prompt_s() -> float:
        with sessions(engine, 1, LONG_PROMPT):
            return step_s(engine, [TOKEN_IDS], 0)

    return _figures(prompt_s, lambda streams: decode_s(engine, streams))


def theirs(file: Path) -> Figures:
    """Seconds of llama.cpp's steps, by its C interface. Raises ImportError where it is not here."""
    cpp = importlib.import_module("llama_cpp")
    silent = cpp.llama_log_callback(lambda *_: None)
    cpp.llama_log_set(silent, ctypes.c_void_p(0))
    cpp.llama_backend_init()
    model = cpp.llama_model_load_from_file(str(file).encode(), cpp.llama_model_default_params())
    if not model:
        raise RuntimeError(f"llama.cpp cannot load {file.name}")
    settings = cpp.llama_context_default_params()
    settings.n_ctx = max(STREAMS) * LONG_PROMPT
    settings.n_batch = settings.n_ubatch = LONG_PROMPT
    settings.n_threads = settings.n_threads_batch = os.cpu_count()
    settings.n_seq_max = max(STREAMS)
    context = cpp.llama_init_from_model(model, settings)
    batch = cpp.llama_batch_init(LONG_PROMPT, 0, 1)

    def run(rows: Sequence[tuple[int, int, int]]) -> float:
        batch.n_tokens = len(rows)
        last = {session: index for index, (session, _, _) in enumerate(rows)}
        for index, (session, position, token_id) in enumerate(rows):
            batch.token[index], batch.pos[index] = token_id, position
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, session
            batch.logits[index] = last[session] == index
        started_s = time.perf_counter()
        if cpp.llama_decode(context, batch):
            raise RuntimeError("llama.cpp's step failed")
        cpp.llama_get_logits_ith(context, len(rows) - 1)  # waits for the step
        return time.perf_counter() - started_s

    def empty() -> None:
        cpp.llama_memory_clear(cpp.llama_get_memory(context), True)

    def prompt_s() -> float:
        empty()
        return run([(0, *each) for each in enumerate(TOKEN_IDS)])

    def steps_s(streams: int) -> float:
        empty()
        took_s = [run([(n, at, n + 1) for n in range(streams)]) for at in range(STEPS)]
        return median(took_s[WARM_STEPS:])

    return _figures(prompt_s, steps_s)


def _figures(prompt_s: Callable[[], float], steps_s: Callable[[int], float]) -> Figures:
    prompts = [prompt_s() for _ in range(1 + PROMPTS)]
    return {
        "prompt_512_s": median(prompts[1:]),
        "step_s": {str(streams): steps_s(streams) for streams in STREAMS},
    }


def write_file(size: Size, kind: str, directory: Path) -> Path:
    """A GGUF file of random weights of that size."""
    plain = directory / "plain"
    if not plain.exists():
        make_layers(
            plain, size.shape, size.layers, CONTEXT_TOKENS, vocab=size.vocab, tied=size.tied
        )
    file = directory / f"{kind}.gguf"
    tokens = {"ggml.model": "none", "ggml.tokens": [f"<{n}>" for n in range(size.vocab)]}
    stated = {"vocab_size": size.vocab} | {
        key: size.shape[name] for key, name in STATED.items() if name in size.shape
    }
    write_gguf(plain, file, of_kind(kind), tokens=tokens, stated=stated)
    return file


def child(by: str, file: Path) -> Figures:
    """One program's figures, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "bench.speed.llama_cpp", "--child", by, str(file)],
        cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    found: Figures = json.loads(done.stdout.splitlines()[-1])
    return found


def compare(file: Path, rounds: int) -> Figures:
    """Medians over the rounds of both programs, which take turns, and their ratios."""
    seen: dict[str, list[Figures]] = {by: [] for by in COMPUTED_BY}
    for _ in range(rounds):
        for by, figures in seen.items():
            figures.append(child(by, file))
    found: Figures = {"file_gib": round(file.stat().st_size / 2**30, 2)}
    for by, figures in seen.items():
        if "missing" in figures[0]:
            return {**found, by: figures[0]}
        found[by] = {
            "prompt_tokens_per_s": round(
                LONG_PROMPT / median(each["prompt_512_s"] for each in figures), 1
            ),
            "tokens_per_s": {
                str(n): round(n / median(each["step_s"][str(n)] for each in figures), 2)
                for n in STREAMS
            },
        }
    mine, other = (found[by] for by in COMPUTED_BY)
    found["prompt_of_llama_cpp"] = round(
        mine["prompt_tokens_per_s"] / other["prompt_tokens_per_s"], 2
    )
    found["decode_of_llama_cpp"] = {
        n: round(rate / other["tokens_per_s"][n], 2) for n, rate in mine["tokens_per_s"].items()
    }
    return found


def _version() -> str:
    try:
        return metadata.version("llama-cpp-python")
    except metadata.PackageNotFoundError:
        return "not installed"


def main() -> int:
    arguments = parse()
    if arguments.child is not None:
        by, file = arguments.child
        try:
            figures = ours(Path(file)) if by == COMPUTED_BY[0] else theirs(Path(file))
        except ImportError as error:
            figures = {"missing": str(error)}
        print(json.dumps(figures))
        return 0
    result: Figures = {
        **report.provenance(SEED),
        "llama_cpp": _version(),
        "rounds": arguments.rounds,
        "models": {},
    }
    for name in arguments.models:
        size = MODELS[name]
        rows = result["models"][name] = {"layers": size.layers, "of_layers": size.whole}
        with tempfile.TemporaryDirectory(prefix="anabranch-bench-") as made:
            for kind in arguments.kinds:
                file = write_file(size, kind, Path(made))
                rows[kind] = compare(file, arguments.rounds)
                file.unlink()
                print(name, kind, json.dumps(rows[kind]), flush=True)
                report.write(arguments.out, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
