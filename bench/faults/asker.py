"""Asks a network all the time, and prints a JSON line for all that whoever asks sees.

``python -m bench.faults.asker MODEL ADDRESS…``; it ends with its standard input. Each line has
``s`` (the machine's steady clock) and ``kind``: ``begin``, ``token``, ``status``, ``done``,
``failed``, and ``serving`` with the peers that are seen to serve.
"""

import asyncio
import json
import sys
import time
from typing import Any

from client import GenerationOptions, Swarm, SwarmConfig
from dht.command_line import loop_factory, raise_descriptor_limit
from dht.errors import AnabranchError
from dht.messages.types import NodeState

PROMPT = "Once upon a time"
TOKENS = 12
PAUSE_S = 1.0
WAIT_S = 120.0


def _say(kind: str, **fields: Any) -> None:
    print(json.dumps({"s": time.monotonic(), "kind": kind, **fields}), flush=True)


async def _watch(swarm: Swarm) -> None:
    while True:
        nodes = swarm.view.nodes
        serving = [p for p, each in nodes.items() if each.state is NodeState.SERVING]
        _say("serving", peers=sorted(serving))
        await asyncio.sleep(1.0)


async def _ask(swarm: Swarm) -> None:
    options = GenerationOptions(max_new_tokens=TOKENS, ignore_eos=True, temperature=0.0)
    while True:
        _say("begin")
        try:
            async for piece in swarm.begin(PROMPT, options=options):
                _say("token", text=str(piece)[:80])
        except (AnabranchError, TimeoutError) as error:
            _say("failed", why=str(error)[:300])
        else:
            _say("done")
        await asyncio.sleep(PAUSE_S)


async def _run(model: str, addresses: list[str]) -> None:
    config = SwarmConfig(wait_s=WAIT_S)
    async with Swarm.connect(
        addresses, model=model, config=config, on_status=lambda text: _say("status", text=text)
    ) as swarm:
        work = [asyncio.create_task(each(swarm)) for each in (_watch, _ask)]
        await asyncio.to_thread(sys.stdin.read)
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)


if __name__ == "__main__":
    raise_descriptor_limit()
    with asyncio.Runner(loop_factory=loop_factory()) as running:
        running.run(_run(sys.argv[1], sys.argv[2:]))
