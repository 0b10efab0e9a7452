"""LiteLLM in an interpreter of its own: a line of JSON for each request, and one for its answer.

Its many packages are no part of this project's; ``bench.agents.outside`` starts it.
"""

import asyncio
import json
import sys
from importlib.metadata import version
from typing import Any


async def ask(request: dict[str, Any]) -> dict[str, Any]:
    """What it reads of the answer to ``request`` (``url``, ``messages``, ``options``)."""
    import litellm

    litellm.suppress_debug_info = True
    found: dict[str, Any] = {"text": "", "thoughts": "", "calls": []}
    calls: dict[int, list[str]] = {}
    try:
        async for chunk in await litellm.acompletion(
            model="openai/" + request["model"],
            api_base=request["url"] + "/v1",
            api_key="none",
            messages=request["messages"],
            stream=True,
            num_retries=0,
            max_retries=0,
            **request["options"],
        ):
            for choice in chunk.choices:
                found["text"] += choice.delta.content or ""
                found["thoughts"] += getattr(choice.delta, "reasoning_content", None) or ""
                for call in choice.delta.tool_calls or ():
                    parts = calls.setdefault(call.index, ["", "", ""])
                    parts[0] += call.id or ""
                    parts[1] += call.function.name or ""
                    parts[2] += call.function.arguments or ""
    except litellm.BadRequestError as error:
        return {"refused": str(error)}
    except Exception as error:  # noqa: BLE001  it is that cell's result
        return {"failed": f"{type(error).__name__}: {error}"}
    return {**found, "calls": list(calls.values())}


def main() -> None:
    """Answer the lines of standard input."""
    print(json.dumps({"name": f"litellm {version('litellm')}"}), flush=True)
    loop = asyncio.new_event_loop()
    for line in sys.stdin:
        print(json.dumps(loop.run_until_complete(ask(json.loads(line)))), flush=True)
