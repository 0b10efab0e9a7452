"""Runs a gateway: listens, closes connections that bring nothing, ends gracefully."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from aiohttp import web

from client.gateway.answering.answers import Answers
from client.gateway.errors import ApiError
from client.gateway.web.app import Gateway
from client.gateway.web.error_answers import answer_to, error_response
from client.pages.listening import CopiedServer, close_idle, listen, runner_of
from dht.process.supervision import Supervisor

logger = logging.getLogger(__name__)


class _Connection(web.RequestHandler):
    """A connection on which the errors that aiohttp makes itself have the form of all others."""

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The response to what is no request (400, whose path is not known) or failed (500)."""
        super().handle_error(request, status, exc, message)  # writes it to the log
        if status == 400:
            reason = (message or "").partition("\n")[0].rstrip(":")
            error = ApiError(400, f"this is no HTTP request that can be read: {reason}")
        else:
            error = ApiError(status, "the gateway failed at this request", type="server_error")
        response = error_response(request, error)
        response.force_close()
        return response


class _Server(CopiedServer):
    """Makes such connections, for the handlers of another server."""

    def __init__(self, made: web.Server) -> None:
        super().__init__(made, self._answered)
        self._handler = made.request_handler

    def __call__(self) -> web.RequestHandler:
        return _Connection(self, loop=self._loop, **self._kwargs)

    async def _answered(self, request: web.BaseRequest) -> web.StreamResponse:
        try:
            return await self._handler(request)
        except web.HTTPException as error:  # made before the application was asked
            return answer_to(request, error)


class _Runner(web.AppRunner):
    __slots__ = ()

    async def _make_server(self) -> web.Server:
        return _Server(await super()._make_server())


@asynccontextmanager
async def serving(
    gateway: Gateway, parts: Supervisor, *, host: str, port: int, head_s: float
) -> AsyncIterator[int]:
    """Serve within the block, which gets the port. A client that hangs up ends its request."""
    runner = runner_of(
        gateway.app,
        keepalive_s=head_s,
        kind=_Runner,
        auto_decompress=False,  # what is unknown would be a 400 without a path
        handler_cancellation=True,
        shutdown_timeout=1.0,
        lingering_time=1.0,
    )
    await runner.setup()
    assert runner.server is not None  # noqa: S101  setup() made it
    try:
        async with parts.beside(partial(close_idle, runner.server, head_s, gateway.is_busy)):
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
