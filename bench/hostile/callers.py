"""Honest callers: each a process that asks short answers all the time and says how that went."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from itertools import count
from pathlib import Path

import aiohttp

from bench.hostile.attacker import MODEL
from bench.hostile.verdict import Asked
from client import Swarm, SwarmConfig
from client.text.tokenizer import Tokenizer

PAUSE_S = 0.5
"""Between two answers of one caller: the machine is to be asked, not full."""
LIMIT_S = 60.0
"""An answer that has not ended by then has failed."""
REASON_CHARS = 2000
"""Of what a caller was told: the addresses of four peers come before the reason."""
Expected = dict[str, tuple[int, ...]]


async def ask_on(
    peers: tuple[str, ...], expected: Expected, gateway: str, fresh: bool, formats: bool = False
) -> None:
    """Ask until killed, a line of JSON before and after each answer.

    Through ``gateway`` if it is given; else as a client that keeps its connection or, with
    ``fresh``, makes a new one for each answer. With ``formats`` each answer follows a grammar that
    no peer has read yet, and that any text follows.
    """
    texts, prompts = texts_of(expected), sorted(expected)
    try:
        async with connected(() if gateway or fresh else peers) as kept:
            for number in count():
                prompt = prompts[number % len(prompts)]
                began_unix_s = time.time()
                print(json.dumps({"began_unix_s": began_unix_s}), flush=True)
                if gateway:
                    asked = await through_gateway(gateway, prompt, texts, expected, began_unix_s)
                else:
                    grammar = any_text(number) if formats else ""
                    asked = await through_swarm(
                        kept, peers, prompt, expected, began_unix_s, grammar
                    )
                print(json.dumps(asdict(asked)), flush=True)
                await asyncio.sleep(PAUSE_S)
    except BrokenPipeError:  # nobody listens any more
        return


def any_text(number: int) -> str:
    """A grammar that all text follows, and that is another for each number."""
    return f'start: TEXT? | "\\x00{time.time_ns()} {number}"\nTEXT: /[\\s\\S]+/'


def texts_of(expected: Expected) -> dict[str, str]:
    """The model's answers as text."""
    tokenizer = Tokenizer.load(MODEL)
    assert tokenizer is not None
    return {prompt: tokenizer.decode(token_ids) for prompt, token_ids in expected.items()}


@asynccontextmanager
async def connected(peers: tuple[str, ...]) -> AsyncIterator[Swarm | None]:
    """A client of the swarm; None without peers to enter by."""
    if not peers:
        yield None
        return
    config = SwarmConfig(wait_s=LIMIT_S)
    async with Swarm.connect(peers, model=str(MODEL), config=config) as swarm:
        yield swarm


async def through_swarm(
    kept: Swarm | None,
    peers: tuple[str, ...],
    prompt: str,
    expected: Expected,
    began_unix_s: float,
    grammar: str = "",
) -> Asked:
    """One answer of the swarm, by a new client where none is kept. Never raises."""
    first_s: float | None = None
    tokens: tuple[int, ...] = ()
    planner = ""
    failed: str | None = None
    try:
        async with asyncio.timeout(LIMIT_S), connected(() if kept else peers) as made:
            swarm = kept or made
            assert swarm is not None
            started_s = time.monotonic()
            options = {"grammar": grammar} if grammar else {"ignore_eos": True}
            tokens_wanted = len(expected[prompt])
            async for piece in swarm.begin(prompt, max_new_tokens=tokens_wanted, **options):
                first_s = first_s or time.monotonic() - started_s
                tokens += piece.token_ids
            planner = "" if swarm.view.plan is None else swarm.view.plan.coordinator
        # Under a grammar an answer ends at its end, and else it has the same tokens.
        wanted = expected[prompt][: len(tokens)] if grammar and tokens else expected[prompt]
        if tokens != tuple(wanted):
            failed = f"wrong tokens: {tokens}"
    except Exception as error:  # noqa: BLE001  (whatever a caller would see is counted)
        failed = f"{type(error).__name__}: {error}"[:REASON_CHARS]
    return Asked(began_unix_s=began_unix_s, ttft_s=first_s, failed=failed, planner=planner)


async def through_gateway(
    gateway: str, prompt: str, texts: dict[str, str], expected: Expected, began_unix_s: float
) -> Asked:
    """One streamed answer of a gateway. Never raises."""
    body = {"model": MODEL.name, "prompt": prompt, "stream": True, "temperature": 0}
    body |= {"max_tokens": len(expected[prompt]), "ignore_eos": True}
    first_s: float | None = None
    got = ""
    failed: str | None = None
    started_s = time.monotonic()
    try:
        async with (
            asyncio.timeout(LIMIT_S),
            aiohttp.ClientSession() as session,
            session.post(f"{gateway}/completions", json=body) as response,
        ):
            if response.status != 200:
                raise OSError(f"{response.status}: {await response.text()}")
            async for line in response.content:
                field, _, data = line.strip().partition(b": ")
                if field != b"data" or data == b"[DONE]":  # a comment while nothing comes
                    continue
                first_s = first_s or time.monotonic() - started_s
                event = json.loads(data)
                if "error" in event:
                    raise OSError(event["error"]["message"])
                got += "".join(choice["text"] for choice in event["choices"])
        if got != texts[prompt]:
            failed = f"wrong text: {got[:100]!r}"
    except Exception as error:  # noqa: BLE001
        failed = f"{type(error).__name__}: {error}"[:REASON_CHARS]
    return Asked(began_unix_s=began_unix_s, ttft_s=first_s, failed=failed)


def read_answers(log: Path, now_unix_s: float) -> list[Asked]:
    """What a caller wrote so far; an answer that never ends has failed."""
    answers: list[Asked] = []
    pending: float | None = None
    for line in log.read_text(errors="replace").splitlines():
        try:
            said = json.loads(line)
        except ValueError:  # a warning, or a line that is being written
            continue
        pending = said["began_unix_s"]
        if len(said) > 1:
            answers.append(Asked(**said))
            pending = None
    if pending is not None and now_unix_s - pending > 2 * LIMIT_S:
        answers.append(Asked(began_unix_s=pending, ttft_s=None, failed="it never ended"))
    return answers
