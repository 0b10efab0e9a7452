"""Clients by template families: each cell runs what agents do, with a model that is scripted.

    python -m bench agents --out bench/results/agents.json

Rows are unmodified clients: SDKs' streaming helpers, LiteLLM, the AI SDK (by node), Claude Code
and Codex. Columns are small templates of the shapes that families have (tests/templates.py). The
model's answers are spelled out, calls in the family's own form; the swarm is made up, all else is
the gateway's.

``--prefix DIRECTORY`` is where npm has the packages ``ai``, ``@ai-sdk/openai-compatible``,
``@anthropic-ai/claude-code`` and ``@openai/codex``; ``ANABRANCH_COMPAT_PYTHON`` an interpreter that
has ``litellm``. Clients that are not there are named in the result.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from bench.agents import outside, programs, sdks
from bench.agents.families import CALLS, ONE_CALL, calls, could_call, says, thinks
from bench.agents.said import TOOL, Ask, Refused, Turn
from bench.report import code, earlier, parser_of, provenance, write
from testing.paths import ROOT
from tests.templates import TEMPLATES
from tests.unit.client.gateway.paper import PaperGateway, paper_gateway
from tests.unit.client.gateway.test_tool_answers import scripted

CONTEXT_TOKENS = 16_384
LIMIT_S = 300.0
"""For one thing that is tried: a busy machine is no fault of the gateway."""
USER = Turn("user", "q-one")


async def cell(ask: Ask, family: str) -> dict[str, str]:
    """What became of each thing that was tried: ``ok``, ``refused`` by name, or what went wrong."""
    found = {}
    async with paper_gateway(template=TEMPLATES[family], context_tokens=CONTEXT_TOKENS) as gateway:
        for name, scenario in SCENARIOS.items():
            try:
                async with asyncio.timeout(LIMIT_S):
                    found[name] = await scenario(ask, gateway, family)
            except Refused as error:
                found[name] = str(error)[:300] if could_call(error, family) else "refused"
            except Exception as error:  # noqa: BLE001  it is this cell's result
                found[name] = f"{type(error).__name__}: {error}"[:300]
    return found


def _prompt(gateway: PaperGateway, request: Any) -> str:
    tokenizer = gateway.swarm.text.tokenizer
    assert tokenizer is not None
    return tokenizer.decode(request.prompt_ids)


def _judged(ok: bool, said: object) -> str:
    return "ok" if ok else f"got {said}"[:300]


async def _chat(ask: Ask, gateway: PaperGateway, family: str) -> str:
    scripted(gateway, says(family, "so"))
    said = await ask(gateway.url, [USER], tools=False, schema=False)
    return _judged(said.text.strip() == "so", said)


async def _instructions(ask: Ask, gateway: PaperGateway, family: str) -> str:
    asked = scripted(gateway, says(family, "so"))
    turns = [
        Turn("system", "s-one"), Turn("developer", "d-one"), USER, Turn("assistant", "a-one"),
        Turn("system", "s-two"), Turn("user", "q-two"),
    ]  # fmt: skip
    await ask(gateway.url, turns, tools=False, schema=False)
    prompt = _prompt(gateway, asked[0])
    return _judged(all(turn.text in prompt for turn in turns), prompt)


def _call(family: str, *places: int) -> str:
    """An answer that calls for each of these; one of a family without calls is never asked for."""
    made = ((TOOL, {"at": f"x-{at}"}) for at in places)
    return calls(family, *made) if family in CALLS else ""


async def _loop(ask: Ask, gateway: PaperGateway, family: str) -> str:
    asked = scripted(gateway, *(_call(family, at) for at in range(3)), says(family, "done"))
    turns = [USER]
    for at in range(3):
        said = await ask(gateway.url, turns, tools=True, schema=False)
        if [json.loads(given) for _, _, given in said.calls] != [{"at": f"x-{at}"}]:
            return f"got {said}"[:300]
        turns += [Turn("assistant", said.text.strip(), said.calls)]
        turns += [Turn("tool", f"r-{at}", answers=said.calls[0][0])]
    said = await ask(gateway.url, turns, tools=True, schema=False)
    prompt = _prompt(gateway, asked[-1])
    told = all(f"{name}-{at}" in prompt for name in "xr" for at in range(3))
    return _judged(told and said.text.strip() == "done", said)


async def _parallel(ask: Ask, gateway: PaperGateway, family: str) -> str:
    asked = scripted(gateway, says(family, "done"))
    made = [(f"call_{at}", TOOL, json.dumps({"at": f"x-{at}"})) for at in range(2)]
    turns = [USER, Turn("assistant", "i-look", made)]
    turns += [Turn("tool", f"r-{at}", answers=f"call_{at}") for at in range(2)]
    await ask(gateway.url, turns, tools=True, schema=False)
    prompt = _prompt(gateway, asked[0])
    told = all(word in prompt for word in ("i-look", "x-0", "x-1", "r-0", "r-1"))
    if family in ONE_CALL:
        return _judged(told, prompt)
    scripted(gateway, _call(family, 0, 1))
    said = await ask(gateway.url, [USER], tools=True, schema=False)
    return _judged(told and len(said.calls) == 2, said)


async def _structured(ask: Ask, gateway: PaperGateway, family: str) -> str:
    asked = scripted(gateway, '{"at": "x"}')
    said = await ask(gateway.url, [USER], tools=False, schema=True)
    followed = b'"at"' in asked[0].sampling.grammar
    return _judged(followed and json.loads(said.text) == {"at": "x"}, said)


async def _thinking(ask: Ask, gateway: PaperGateway, family: str) -> str:
    thought = thinks(family, "hm")
    if thought is None or ask in sdks.SILENT:
        return "none"
    scripted(gateway, thought + says(family, "so"))
    said = await ask(gateway.url, [USER], tools=False, schema=False)
    return _judged((said.text.strip(), said.thoughts.strip()) == ("so", "hm"), said)


async def _long(ask: Ask, gateway: PaperGateway, family: str) -> str:
    asked = scripted(gateway, says(family, "so"))
    await ask(gateway.url, [Turn("user", "a long way " * 3000)], tools=False, schema=False)
    return _judged(len(asked[0].prompt_ids) > CONTEXT_TOKENS // 2, len(asked[0].prompt_ids))


async def _overflow(ask: Ask, gateway: PaperGateway, family: str) -> str:
    try:
        turns = [Turn("user", "a long way " * 30_000)]
        said = await ask(gateway.url, turns, tools=False, schema=False)
    except Refused as error:
        known = ("maximum context length is", "prompt is too long: ")
        return _judged(any(words in str(error) for words in known), error)
    return f"got {said}"[:300]


SCENARIOS: Mapping[str, Callable[[Ask, PaperGateway, str], Awaitable[str]]] = {
    "chat": _chat,
    "system and developer messages": _instructions,
    "a loop of three calls": _loop,
    "parallel calls": _parallel,
    "structured output": _structured,
    "thinking": _thinking,
    "a long prompt": _long,
    "overflow": _overflow,
}


async def run(prefix: Path, only: str, table: "Table") -> None:
    """Fill in all cells of the clients whose names begin with ``only``; ``prefix`` is where npm has
    its packages."""

    async def add(name: str, cell_of: Callable[[str], Awaitable[dict[str, str]]]) -> None:
        for family in TEMPLATES:
            if not table.has(name, family):
                table.add(name, family, await cell_of(family))

    def is_meant(name: str) -> bool:
        return name.lower().startswith(only.lower())

    for name, ask in sdks.CLIENTS.items():
        if is_meant(name):
            await add(name, partial(cell, ask))
    for client in filter(is_meant, outside.CLIENTS):
        async with outside.started(outside.command_of(client, prefix)) as found:
            if found is None:
                table.missing(client)
            else:
                await add(found[0], partial(cell, found[1]))
    path = programs.path_of(prefix)
    for program in programs.PROGRAMS:
        if not is_meant(program.title):
            continue
        version = await programs.version_of(program, path)
        if version is None:
            table.missing(program.title)
        else:
            await add(version, partial(programs.cell, program, path))


GOOD = frozenset({"ok", "none", "refused"})


class Table:
    """The cells so far, written to a file with each new one: a run that is cut short goes on from
    there. A row says which code made it; one of other code begins anew."""

    def __init__(self, out: Path | None) -> None:
        self._out = out
        known = earlier(out)
        self.result: dict[str, Any] = {
            **provenance(0),
            "emulated": "the swarm is made up and its answers are scripted",
            "missing": [],
            "made": known.get("made", {}),
            "cells": known.get("cells", {}),
        }
        self._made = code()
        for client in self.result["cells"]:
            self.result["made"].setdefault(client, {"commit": known["commit"]})

    def _is_same(self, client: str) -> bool:
        """Whether a row was made by this code."""
        return bool(self.result["made"].get(client, {}).get("sources") == self._made["sources"])

    def has(self, client: str, family: str) -> bool:
        """Whether this code was seen to do well here."""
        tried = self.result["cells"].get(client, {}).get(family)
        return self._is_same(client) and tried is not None and GOOD.issuperset(tried.values())

    def add(self, client: str, family: str, tried: Mapping[str, str]) -> None:
        """Take a cell in the place of what was known."""
        row = self.result["cells"].get(client, {}) if self._is_same(client) else {}
        row[family] = tried
        self.result["made"][client] = self._made
        self.result["cells"][client] = {each: row[each] for each in TEMPLATES if each in row}
        if self._out is not None:
            write(self._out, self.result)

    def missing(self, client: str) -> None:
        """Note a client that is not there."""
        self.result["missing"].append(client)


def main() -> None:
    parser = parser_of("bench.agents", __doc__)
    parser.add_argument(
        "--prefix", type=Path, default=ROOT / ".venv" / "agents", help="packages of npm"
    )
    parser.add_argument(
        "--only",
        default="",
        metavar="NAME",
        help="run clients whose names begin so, and keep the other rows of --out",
    )
    arguments = parser.parse_args()
    table = Table(arguments.out)
    asyncio.run(run(arguments.prefix.resolve(), arguments.only, table))
    write(arguments.out, table.result)
    print("not there:", ", ".join(table.result["missing"]) or "none")
    for client, row in table.result["cells"].items():
        for family, tried in row.items():
            for name, each in tried.items():
                if each not in GOOD:
                    print(f"{client}, {family}, {name}: {each}")


if __name__ == "__main__":
    main()
