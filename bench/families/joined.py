"""A model behind two ``node.join`` processes, held against ``transformers``.

Each peer holds half of the layers. Asked are a long prompt, one that goes on from its beginning in
the KV that was kept of it, and several at a time, which draft. What an answer should be is what one
forward of ``transformers`` without a cache, over the prompt and that answer, gives at each place,
up to the first token that stands for padding: some families count its place only with a cache.
"""

import asyncio
import random
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from testing.forked import forked
from testing.local_swarm import LocalSwarm

SEED = 0
MEMORY_GIB = 1.0
SERVING_LIMIT_S = 300.0
"""Time limit for both peers to serve; they take some seconds on a machine that is free."""
WAIT_S = 180.0
"""As long as a route may take to be found; a free machine needs a second."""
KEPT_TOKENS = 1024
"""Tokens of the beginning that the long prompts share: whole pages of KV."""
CHUNKS = (13, 1)
"""Tokens of the long prompts behind that. Where the beginning's KV is kept, these are the last
prompts' only chunks."""
TOKEN_IDS = range(3, 101)
"""Token ids of prompts: no special ones (:data:`bench.families.every_family.SMALL`)."""
NEW_TOKENS = 8
REPEATED, REPEATS, DRAFTED_TOKENS = 7, 6, 32
"""Length of what a short prompt repeats, how often, and the tokens asked behind it: those that
repeat, too, are drafted."""
NEAR = 1e-3
"""Maximum logit that a token may lie below the greatest one, in standard deviations of the logits:
kernels that add in another order differ by less."""


class Sequenced(NamedTuple):
    """A prompt and its answer."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


class Asked(NamedTuple):
    """What two peers answered."""

    answers: list[Sequenced]
    cached_tokens: int
    """Tokens of prompts that were found in KV that was kept."""
    drafted_tokens: int
    """Tokens of answers that came of drafts."""


def prompts() -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """The long prompts, and the short ones, which repeat themselves."""
    rng = random.Random(SEED)

    def drawn(count: int) -> tuple[int, ...]:
        return tuple(rng.choices(TOKEN_IDS, k=count))

    begun = drawn(KEPT_TOKENS)
    return [begun + drawn(count) for count in CHUNKS], [drawn(REPEATED) * REPEATS for _ in CHUNKS]


async def ask(directory: Path, addresses: Sequence[str]) -> Asked:
    """Ask the peers at ``addresses`` for greedy answers. Raises UnavailableError."""
    from client import Answer, Swarm
    from client.swarm.swarm import SwarmConfig

    long, short = prompts()
    config = SwarmConfig(wait_s=WAIT_S)
    found: list[tuple[tuple[int, ...], Answer]] = []
    async with Swarm.connect(addresses, model=str(directory), config=config) as swarm:

        async def answer(prompt: tuple[int, ...], tokens: int) -> None:
            answered = await swarm.generate(prompt, max_new_tokens=tokens, ignore_eos=True)
            found.append((prompt, answered))

        await answer(long[0], NEW_TOKENS)
        await answer(long[1], NEW_TOKENS)
        async with asyncio.TaskGroup() as together:
            for prompt in short:
                together.create_task(answer(prompt, DRAFTED_TOKENS))
            together.create_task(answer(long[0], NEW_TOKENS))
    return Asked(
        answers=[Sequenced(prompt, given.token_ids) for prompt, given in found],
        cached_tokens=sum(given.cached_tokens for _, given in found),
        drafted_tokens=sum(given.drafted_tokens for _, given in found),
    )


def strayed(directory: Path, answers: Sequence[Sequenced]) -> str:
    """Where an answer is not what ``transformers`` gives; empty where all are."""
    import torch

    from dht.checkpoints.model_files import library_config
    from node.model.inspection.meta_model import auto_class

    family = auto_class(library_config(directory))
    model = family.from_pretrained(directory, dtype=torch.float32).eval()
    padding = model.config.get_text_config().pad_token_id
    for prompt, whole in dict.fromkeys(answers):
        answer = whole[: whole.index(padding) + 1] if padding in whole else whole
        seen = torch.tensor([prompt + answer])
        with torch.no_grad():
            logits = model(input_ids=seen, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
        for place, (given, row) in enumerate(zip(answer, logits, strict=True)):
            if not row.max() - row[given] <= NEAR * row.std():  # false for numbers that are none
                told = f"token {place} behind {len(prompt)} is {given} instead of {row.argmax()}"
                return f"through node.join, {told}"
    return ""


def swarm_of(directory: Path, layers: int) -> LocalSwarm:
    """Two peers that serve half of the layers each, or one for a single layer.

    Raises PeerStartError, with the end of a peer's log.
    """
    extra = ("--threads", "1", "--memory", str(MEMORY_GIB), "--port", "0")
    swarm = LocalSwarm(directory, extra=extra, start=forked)
    cuts = sorted({0, layers // 2, layers})
    try:
        for start, end in pairwise(cuts):
            peer = swarm.start_peer(extra=["--layers", f"{start}:{end}"])
            peer.wait_for("measured", SERVING_LIMIT_S)  # the second one need not measure it again
        swarm.wait_serving(SERVING_LIMIT_S)
    except BaseException:
        swarm.stop()
        raise
    return swarm
