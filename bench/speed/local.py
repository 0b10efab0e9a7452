"""Speed of a local swarm beside ``transformers.generate`` in one process, in one run.

For each model: decode tokens/s of one stream, time to the first token of a 512-token prompt, and
total tokens/s of 4 and 8 streams, for swarms of 2 and 3 peers, alternately with the single process
so that both see the same noise. Also where a token's time goes in the swarm. All peers share this
machine's cores; the single process has them to itself.
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from bench import report
from client import Swarm
from testing.local_swarm import LocalSwarm
from testing.paths import ROOT
from testing.random_model import make_llama
from testing.reference import Reference, memory_for

PROMPT_TOKENS = 16
LONG_PROMPT_TOKENS = 512
SHARES = {2: (0.65, 0.62), 3: (0.47, 0.45, 0.43)}
"""Parts of the whole model's memory that the peers lend."""


def parse() -> argparse.Namespace:
    parser = report.parser_of("bench.speed.local", __doc__)
    parser.add_argument("--models", nargs="+", default=["bundled", "512x8", "1024x16"])
    parser.add_argument("--peers", nargs="+", type=int, default=[2, 3])
    parser.add_argument("--tokens", type=int, default=64, help="new tokens per answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def prompt_ids(tokens: int, vocab: int, seed: int) -> list[int]:
    """A repeatable prompt of random ids that avoids special ones."""
    import random

    rng = random.Random(seed)
    return [rng.randrange(300, vocab) for _ in range(tokens)]


async def streams(swarm: Swarm, vocab: int, tokens: int, count: int, seed: int) -> float:
    """Total new tokens/s of ``count`` answers at once."""
    started_s = time.perf_counter()
    await asyncio.gather(
        *(
            swarm.generate(
                prompt_ids(PROMPT_TOKENS, vocab, seed + index),
                max_new_tokens=tokens,
                ignore_eos=True,
            )
            for index in range(count)
        )
    )
    return count * tokens / (time.perf_counter() - started_s)


def single(reference: Reference, vocab: int, tokens: int, seed: int) -> dict[str, float]:
    """The same figures of one process."""
    short = prompt_ids(PROMPT_TOKENS, vocab, seed)
    _, first_s = reference.greedy(short, 1, ignore_eos=True)
    _, all_s = reference.greedy(short, tokens, ignore_eos=True)
    long = prompt_ids(LONG_PROMPT_TOKENS, vocab, seed)
    _, ttft_s = reference.greedy(long, 1, ignore_eos=True)
    return {"tokens_per_s": (tokens - 1) / (all_s - first_s), "ttft_512_s": ttft_s}


def token_time(before: Sequence[dict[str, Any]], after: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Seconds that all peers together spent between two ``stats`` events of each, by what."""
    keys = ("compute_s", "waiting_s", "serialisation_s")
    return {key: sum(a[key] - b[key] for a, b in zip(after, before, strict=True)) for key in keys}


async def measure_swarm(
    local: LocalSwarm, model: Path, reference: Reference, arguments: argparse.Namespace
) -> dict[str, Any]:
    """All figures of one swarm, alternating with the single process."""
    vocab = reference.model.config.vocab_size
    rounds: list[dict[str, Any]] = []
    async with Swarm.connect(local.addresses, model=str(model)) as swarm:
        warm = prompt_ids(PROMPT_TOKENS, vocab, 0)
        await swarm.generate(warm, max_new_tokens=4, ignore_eos=True)
        single(reference, vocab, 4, 0)
        for index in range(arguments.rounds):
            seed = arguments.seed * 1000 + index
            alone = single(reference, vocab, arguments.tokens, seed)
            before = await _stats(local)
            started_s = time.perf_counter()
            answer = await swarm.generate(
                prompt_ids(PROMPT_TOKENS, vocab, seed),
                max_new_tokens=arguments.tokens,
                ignore_eos=True,
            )
            wall_s = time.perf_counter() - started_s
            after = await _stats(local)
            spent = token_time(before, after)
            long = await swarm.generate(
                prompt_ids(LONG_PROMPT_TOKENS, vocab, seed), max_new_tokens=2, ignore_eos=True
            )
            round_: dict[str, Any] = {
                "single": alone,
                "swarm": {
                    "tokens_per_s": 1 / answer.tpot_s,
                    "ttft_512_s": long.ttft_s,
                    "total_4_tokens_per_s": await streams(swarm, vocab, arguments.tokens, 4, seed),
                    "total_8_tokens_per_s": await streams(swarm, vocab, arguments.tokens, 8, seed),
                },
                "token_ms": {
                    **{key[:-2]: 1e3 * spent[key] / arguments.tokens for key in spent},
                    "transport": 1e3 * (wall_s - sum(spent.values())) / arguments.tokens,
                    "total": 1e3 * wall_s / arguments.tokens,
                },
            }
            rounds.append(round_)
        stages = [f"{s.start}-{s.end}" for s in answer.route]
    return {"stages": stages, "median": _median(rounds), "rounds": rounds}


async def _stats(local: LocalSwarm) -> list[dict[str, Any]]:
    """The newest ``stats`` event of each peer, once all peers have become idle."""
    await asyncio.sleep(0.3)
    return [peer.find("stats") or {} for peer in local.peers]


def _median(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The median over the rounds of every figure, with the ratios to the single process."""
    merged: dict[str, Any] = {
        group: {key: statistics.median(r[group][key] for r in rounds) for key in rounds[0][group]}
        for group in ("single", "swarm", "token_ms")
    }
    alone = merged["single"]["tokens_per_s"]
    merged["ratio"] = {
        "one_stream": merged["swarm"]["tokens_per_s"] / alone,
        "four_streams": merged["swarm"]["total_4_tokens_per_s"] / alone,
        "eight_streams": merged["swarm"]["total_8_tokens_per_s"] / alone,
        "ttft_512": merged["swarm"]["ttft_512_s"] / merged["single"]["ttft_512_s"],
    }
    return merged


def main() -> int:
    arguments = parse()
    console = Console()
    result: dict[str, Any] = {**report.provenance(arguments.seed), "models": {}}
    with tempfile.TemporaryDirectory(prefix="anabranch-bench-") as scratch:
        for name in arguments.models:
            model = model_of(name, Path(scratch))
            reference = Reference.load(model)
            whole = memory_for(model)
            result["models"][name] = {}
            for peers in arguments.peers:
                console.print(f"{name}, {peers} peers …")
                with LocalSwarm(model) as local:
                    for share in SHARES[peers]:
                        local.start_peer(memory_gib=share * whole / 2**30)
                    local.wait_serving()
                    figures = asyncio.run(measure_swarm(local, model, reference, arguments))
                result["models"][name][str(peers)] = figures
                report.write(arguments.out, result)
    print(table_of(result))
    return 0


def model_of(name: str, scratch: Path) -> Path:
    """``bundled``, or a random Llama such as ``512x8`` made in ``scratch``."""
    if name == "bundled":
        return ROOT / "models" / "brook"
    hidden, layers = (int(part) for part in name.split("x"))
    return make_llama(scratch / name, hidden=hidden, layers=layers)


def table_of(result: dict[str, Any]) -> str:
    """The medians for people."""
    return report.table(
        "model | peers | one process, tokens/s | swarm, tokens/s | ratio | 4 streams | 8 streams"
        " | TTFT 512, one process, s | swarm, s | token, ms: compute + serialise + wait + travel",
        "{model} | {peers} | {single[tokens_per_s]:.1f} | {swarm[tokens_per_s]:.1f}"
        " | {ratio[one_stream]:.2f} | {ratio[four_streams]:.2f} | {ratio[eight_streams]:.2f}"
        " | {single[ttft_512_s]:.3f} | {swarm[ttft_512_s]:.3f} | {token_ms[compute]:.2f}"
        " + {token_ms[serialisation]:.2f} + {token_ms[waiting]:.2f} + {token_ms[transport]:.2f}",
        [
            {"model": model, "peers": peers, **figures["median"]}
            for model, by_peers in result["models"].items()
            for peers, figures in by_peers.items()
        ],
    )


if __name__ == "__main__":
    sys.exit(main())
