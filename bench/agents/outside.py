"""Clients in processes of their own, which take a line of JSON for each request."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.agents.said import (
    FORMAT,
    MODEL,
    SCHEMA,
    Ask,
    Refused,
    Said,
    Turn,
    chat_messages,
    chat_options,
)
from testing.paths import ROOT

HERE = Path(__file__).parent
LINE_BYTES_MAX = 1 << 24
LITE_LLM = "bench.agents.lite_llm"
CLIENTS = ("LiteLLM", "AI SDK")


def command_of(client: str, prefix: Path) -> list[str]:
    """What starts a client; ``prefix`` has the packages of npm."""
    if client == "LiteLLM":
        python = os.environ.get("ANABRANCH_COMPAT_PYTHON", sys.executable)
        return [python, "-c", f"from {LITE_LLM} import main; main()"]
    return ["node", str(HERE / "ai_sdk.mjs"), str(prefix)]


@asynccontextmanager
async def started(command: Sequence[str]) -> AsyncIterator[tuple[str, Ask] | None]:
    """The name of a client with its version, and what asks by it; None where it is not there."""
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            cwd=ROOT,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            limit=LINE_BYTES_MAX,
        )
    except OSError:
        yield None
        return
    assert process.stdin is not None
    assert process.stdout is not None
    stdin, stdout = process.stdin, process.stdout

    async def ask(url: str, turns: Sequence[Turn], *, tools: bool, schema: bool) -> Said:
        request: dict[str, Any] = {
            "url": url,
            "model": MODEL,
            "turns": [asdict(turn) for turn in turns],
            "messages": chat_messages(turns),
            "options": chat_options(tools=tools, schema=schema),
            "tool": SCHEMA if tools else None,
            "format": FORMAT["schema"] if schema else None,
        }
        stdin.write(json.dumps(request).encode() + b"\n")
        await stdin.drain()
        answer = json.loads(await stdout.readline())
        if "refused" in answer:
            raise Refused(answer["refused"])
        if "failed" in answer:
            raise RuntimeError(answer["failed"])
        calls = [(one, two, three) for one, two, three in answer["calls"]]
        return Said(answer["text"], answer["thoughts"], calls)

    try:
        first = await stdout.readline()
        yield (json.loads(first)["name"], ask) if first else None
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
