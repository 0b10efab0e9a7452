"""What it saves that stages keep the KV of earlier sessions, over a wide network.

    sudo python -m bench.speed.prefix [--only "chat"] [--out bench/results/prefix.json]

Six real peers, two for each of three stages, each in a network namespace of its own (50 ms round
trips, 100 Mbit/s; :mod:`testing.wan_lab`), serve a random Llama in float32. One client holds a chat
of 10 turns over 2,000 tokens, and an agent's 20 turns over 8,000; then the agent's again, while
other clients hold chats of their own, and with a stage of its route killed in the middle. Some
turns of each are asked again with ``prefix_cache=off``: the answers must be the same. Time to the
first token is that of the client.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.report import parser_of, provenance, write
from client.answer.answer import Answer, PrefixCache
from client.swarm.swarm import Swarm
from dht.command_line import loop_factory
from testing.local_swarm import LocalSwarm
from testing.random_model import make_llama
from testing.wan_lab import Shape, WanLab, why_not

VOCAB, LAYERS, HIDDEN = 8192, 6, 256
SPANS = ("0:2", "2:4", "4:6") * 2
CLIENT = len(SPANS)
LINK = Shape(mbit=100, delay_ms=25)
END_S = 3600.0
MEMORY_GIB = 0.15
SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Talk:
    """A conversation: what it begins with, and what every turn adds."""

    history: int
    """Tokens before the first turn."""
    turns: int
    said: int
    """Tokens that come with each turn."""
    answered: int
    kills: bool = False
    """Whether a stage of the route is killed in the middle."""
    off_every: int = 3
    """One turn in ``off_every`` is asked again without the cache."""
    beside: int = 0
    """Other clients that hold chats of their own meanwhile."""


TALKS = {
    "chat": Talk(history=2000, turns=10, said=100, answered=48),
    "agent": Talk(history=8000, turns=20, said=200, answered=32, off_every=6),
    "agent, two clients beside": Talk(
        history=8000, turns=20, said=200, answered=32, off_every=6, beside=2
    ),
    "agent, a stage killed": Talk(
        history=8000, turns=20, said=200, answered=32, off_every=6, kills=True
    ),
}
BESIDE = Talk(history=200, turns=10, said=50, answered=32)
"""A chat of a client beside; the next begins where one ends."""


@contextlib.asynccontextmanager
async def others(job: dict[str, Any], count: int) -> AsyncIterator[list[int]]:
    """Clients that hold chats of their own as long as the block lasts, which fails where one of
    them does; yields a list that grows by the tokens of each of their answers."""
    answered: list[Sequence[int]] = []

    async def chat(seed: int) -> None:
        rng = random.Random(seed)
        async with Swarm.connect(job["peers"], model=job["model"]) as client:
            while True:
                prompt = [rng.randrange(VOCAB) for _ in range(BESIDE.history)]
                for _ in range(BESIDE.turns):
                    prompt += [rng.randrange(VOCAB) for _ in range(BESIDE.said)]
                    answer = await client.generate(prompt, max_new_tokens=BESIDE.answered)
                    answered.append(answer.token_ids)
                    prompt += answer.token_ids

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(chat(1000 + number)) for number in range(count)]
        yield answered
        for task in tasks:
            task.cancel()


async def hold(client: Swarm, talk: Talk, pids: dict[str, int], seed: int) -> dict[str, Any]:
    """Hold a conversation, then ask some of its turns again without the cache."""
    rng = random.Random(seed)

    async def ask(prompt: list[int], cache: PrefixCache, salt: str = "") -> Answer:
        return await client.generate(
            prompt, max_new_tokens=talk.answered, prefix_cache=cache, cache_salt=salt
        )

    prompt = [rng.randrange(VOCAB) for _ in range(talk.history)]
    turns: list[dict[str, Any]] = []
    asked: list[tuple[list[int], Answer]] = []
    for number in range(talk.turns):
        if talk.kills and number == talk.turns // 2:
            os.kill(pids[asked[-1][1].route[1].peer_id], signal.SIGKILL)
        known = len(prompt) - 1 if number else 0
        prompt += [rng.randrange(VOCAB) for _ in range(talk.said)]
        answer = await ask(prompt, PrefixCache.OWN)
        asked.append((list(prompt), answer))
        turns.append(
            {
                "prompt_tokens": len(prompt),
                "new_rows": len(prompt) - known,
                "run_rows": len(prompt) - answer.cached_tokens,
                "ttft_s": answer.ttft_s,
                "failovers": answer.failovers,
            }
        )
        prompt += answer.token_ids
    differ = 0
    for number in range(1, talk.turns, talk.off_every):
        ids, answer = asked[number]
        without = await ask(ids, PrefixCache.OFF)
        turns[number]["ttft_off_s"] = without.ttft_s
        differ += without.token_ids != answer.token_ids
    stranger = await ask(asked[-1][0], PrefixCache.OWN, salt="another")
    again = await ask(asked[-1][0], PrefixCache.OWN)
    return {
        **asdict(talk),
        **figures(turns, talk),
        "answers_that_differ": differ,
        "another_salt": {"cached_tokens": stranger.cached_tokens, "ttft_s": stranger.ttft_s},
        "the_same_again": {"cached_tokens": again.cached_tokens, "ttft_s": again.ttft_s},
        "rows": turns,
    }


def figures(turns: list[dict[str, Any]], talk: Talk) -> dict[str, Any]:
    """What the turns after the first come to; without the cache, time grows with the prompt."""
    later = turns[1:]
    off = [turn for turn in later if "ttft_off_s" in turn]
    per_token_s = statistics.fmean(turn["ttft_off_s"] / turn["prompt_tokens"] for turn in off)
    ratios = [turn["ttft_s"] / (per_token_s * turn["prompt_tokens"]) for turn in later]
    found = {
        "ttft_of_off": statistics.median(turn["ttft_s"] / turn["ttft_off_s"] for turn in off),
        "ttft_mean_of_off": statistics.fmean(ratios),
        "rows_of_new": sum(t["run_rows"] for t in later) / sum(t["new_rows"] for t in later),
        "ttft_on_median_s": statistics.median(turn["ttft_s"] for turn in later),
        "ttft_off_median_s": statistics.median(turn["ttft_off_s"] for turn in off),
    }
    if talk.kills:
        struck = ratios[talk.turns // 2 - 1 :]
        found["ttft_of_off_when_struck"] = struck[0]
        found["ttft_mean_of_off_since"] = statistics.fmean(struck)
    return found


async def run_client(job: dict[str, Any]) -> dict[str, Any]:
    """All conversations, each by a client of its own."""
    found = {}
    for seed, name in enumerate(job["talks"]):
        talk = TALKS[name]
        async with (
            others(job, talk.beside) as beside,
            Swarm.connect(job["peers"], model=job["model"]) as client,
        ):
            for _ in range(6):  # links are opened by the first answers
                warm = [random.randrange(VOCAB) for _ in range(8)]
                await client.generate(warm, max_new_tokens=2, prefix_cache=PrefixCache.OFF)
            found[name] = await hold(client, talk, job["pids"], seed)
            if talk.beside:
                found[name]["answers_beside"] = len(beside)
            print(name, {**found[name], "rows": ...}, file=sys.stderr, flush=True)
    return found


def measure(talks: Sequence[str]) -> dict[str, Any]:
    """Start the peers on their hosts and ask from another."""
    with contextlib.ExitStack() as stack:
        made = stack.enter_context(tempfile.TemporaryDirectory())
        model = make_llama(
            Path(made) / "llama", hidden=HIDDEN, layers=LAYERS, vocab=VOCAB, context_tokens=16384
        )
        lab = stack.enter_context(WanLab(len(SPANS) + 1, LINK))
        swarm = stack.enter_context(LocalSwarm(model, extra=("--threads", "1")))
        for number, span in enumerate(SPANS):
            peer = swarm.start_peer(
                memory_gib=MEMORY_GIB,
                extra=("--layers", span),
                host=lab.address(number),
                run_on=lab.command(number, []),
            )
            peer.wait_for("serving", 180.0)
        job = {
            "peers": swarm.addresses[:2],
            "pids": {peer.peer_id: peer.process.pid for peer in swarm.peers},
            "model": model.name,
            "talks": list(talks),
        }
        command = [sys.executable, "-m", "bench.speed.prefix", "--job", json.dumps(job)]
        found: dict[str, Any] = json.loads(lab.output(CLIENT, command, END_S))
        return found


def main() -> int:
    parser = parser_of("bench.speed.prefix", __doc__)
    parser.add_argument(
        "--only", nargs="+", choices=TALKS, default=list(TALKS), help="these conversations"
    )
    parser.add_argument("--job", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.job is not None:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            print(json.dumps(runner.run(run_client(json.loads(arguments.job)))))
        return 0
    if (reason := why_not()) is not None:
        raise SystemExit(f"error: {reason}")
    found = measure(arguments.only)
    for name, each in found.items():
        print(name, {key: value for key, value in each.items() if key != "rows"})
    if arguments.out is not None:
        link = {"rtt_ms": 2 * LINK.delay_ms, "mbit": LINK.mbit}
        write(arguments.out, {**provenance(SEED), **link, "talks": found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
