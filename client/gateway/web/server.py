"""Runs a gateway: listens, closes connections that bring nothing, ends gracefully."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from aiohttp import web

from client.gateway.answering.answers import Answers
from client.gateway.web.app import Gateway
from client.pages.listening import listen, runner_of
from dht.process.supervision import Supervisor

logger = logging.getLogger(__name__)


async def close_idle(server: web.Server, gateway: Gateway, limit_s: float) -> None:
    """Close connections that have brought no whole request head for ``limit_s``, until cancelled.

    aiohttp bounds the time between requests, but not how long a head may take.
    """
    loop = asyncio.get_running_loop()
    idle_since_s: dict[Any, float] = {}
    while True:
        await asyncio.sleep(min(1.0, limit_s / 4))
        now_s = loop.time()
        idle = [each for each in server.connections if not gateway.is_busy(each)]
        idle_since_s = {each: idle_since_s.get(each, now_s) for each in idle}
        for connection, since_s in idle_since_s.items():
            if now_s - since_s > limit_s and connection.transport is not None:
                connection.transport.abort()


@asynccontextmanager
async def serving(
    gateway: Gateway, parts: Supervisor, *, host: str, port: int, head_s: float
) -> AsyncIterator[int]:
    """Serve within the block, which gets the port. A client that hangs up ends its request."""
    runner = runner_of(
        gateway.app,
        keepalive_s=head_s,
        handler_cancellation=True,
        shutdown_timeout=1.0,
        lingering_time=1.0,
    )
    await runner.setup()
    assert runner.server is not None  # noqa: S101  setup() made it
    try:
        async with parts.beside(partial(close_idle, runner.server, gateway, head_s)):
            yield await listen(runner, host, port)
    finally:
        await runner.cleanup()


async def drain(gateway: Gateway, answers: Answers, limit_s: float) -> bool:
    """Refuse new requests and wait for those that run; False when ``limit_s`` was too short."""
    gateway.draining = True
    try:
        async with asyncio.timeout(limit_s):
            await answers.idle.wait()
    except TimeoutError:
        return False
    return True
