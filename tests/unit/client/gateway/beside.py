"""A gateway on paper on a loop of its own, for clients that block."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from tests.unit.client.gateway.paper import PaperGateway, PaperSwarm, paper_gateway

LIMIT_S = 60.0
Result = TypeVar("Result")


@dataclass
class GatewayBeside:
    """A gateway on paper; what is done to it is done on its own loop."""

    gateway: PaperGateway
    _loop: asyncio.AbstractEventLoop

    @property
    def url(self) -> str:
        return self.gateway.url

    @property
    def swarm(self) -> PaperSwarm:
        """To be set up between two requests."""
        return self.gateway.swarm

    def do(self, what: Callable[[], Result]) -> Result:
        """Run ``what`` on the gateway's loop, and wait for it."""

        async def run() -> Result:
            return what()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(LIMIT_S)


@contextmanager
def gateway_beside(**named: Any) -> Iterator[GatewayBeside]:
    """A gateway of these options (see ``paper_gateway``) within the block."""
    started: list[PaperGateway] = []
    ready, ends = threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        async with paper_gateway(**named) as gateway:
            started.append(gateway)
            ready.set()
            await ends.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        assert ready.wait(LIMIT_S)
        yield GatewayBeside(started[0], loop)
    finally:
        loop.call_soon_threadsafe(ends.set)
        thread.join(LIMIT_S)
        loop.close()
