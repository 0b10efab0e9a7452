"""Listening for HTTP, as the gateway and the pages do."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from dht.budget import neighbourhood_of
from dht.errors import UserError, reason_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ListeningConfig:
    """How long a connection may hold what was asked for there."""

    taken_s: float = 60.0
    """Time to take an answer, of 2 MB at most."""
    connections_max: int = 256
    """Connections to a page at a time: each may hold an answer that nobody takes."""


LISTENING = ListeningConfig()

CLIENTS_FAULTS = HttpProcessingError, web.RequestPayloadError, UnicodeEncodeError
"""What aiohttp raises for no HTTP, for a body that cannot be unpacked, and for a header that is no
UTF-8 where it repeats that."""


def _is_of_us(record: logging.LogRecord) -> bool:
    """Whether a record is not about a client that speaks no HTTP: scanners of ports and browsers
    that try TLS do that all day, and no traceback helps who reads of it."""
    return record.exc_info is None or not isinstance(record.exc_info[1], CLIENTS_FAULTS)


logger.addFilter(_is_of_us)


def runner_of(
    app: web.Application,
    *,
    keepalive_s: float,
    kind: type[web.AppRunner] = web.AppRunner,
    **named: Any,
) -> web.AppRunner:
    """What runs ``app``, and closes a connection after ``keepalive_s`` without a request. ``named``
    goes to ``aiohttp``."""
    return kind(app, access_log=None, keepalive_timeout=keepalive_s, logger=logger, **named)


class PageRunner(web.AppRunner):
    """Runs a page, whose visitors all come at once and ask for little.

    One connection more than there may be ends the oldest of the address that has the most: a crowd
    from one place costs its own.
    """

    __slots__ = ()

    async def _make_server(self) -> web.Server:
        return _PageServer(await super()._make_server())


class CopiedServer(web.Server):
    """A server as ``made`` is, which a runner of aiohttp made; ``handler`` goes before its own."""

    def __init__(self, made: web.Server, handler: Any = None) -> None:
        super().__init__(
            handler or made.request_handler,
            request_factory=made.request_factory,
            handler_cancellation=made.handler_cancellation,
            loop=made._loop,
            **made._kwargs,
        )


class _PageServer(CopiedServer):
    """Another server's, with fewer connections."""

    def __init__(self, made: web.Server) -> None:
        super().__init__(made)
        self._open: dict[web.RequestHandler, str] = {}
        """Where each connection comes from, the oldest first."""

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        """Count a connection, and end another where it is one too many."""
        super().connection_made(handler, transport)
        peer = transport.get_extra_info("peername") or ("",)
        self._open[handler] = neighbourhood_of(peer[0])
        if len(self._open) > LISTENING.connections_max:
            [(crowd, _)] = Counter(self._open.values()).most_common(1)
            oldest = next(each for each, whence in self._open.items() if whence == crowd)
            del self._open[oldest]
            if oldest.transport is not None:
                oldest.transport.abort()

    def connection_lost(
        self, handler: web.RequestHandler, exc: BaseException | None = None
    ) -> None:
        """Count it no more."""
        super().connection_lost(handler, exc)
        self._open.pop(handler, None)


async def close_idle(
    server: web.Server,
    limit_s: float = LISTENING.taken_s,
    is_busy: Callable[[Any], bool] = lambda connection: False,
) -> None:
    """Close connections that for ``limit_s`` have brought no whole request head, or not taken what
    they asked for, until cancelled. ``is_busy``: whether an answer is being made there.

    aiohttp bounds the time between requests, but neither how long a head may take nor an answer.
    """
    loop = asyncio.get_running_loop()
    seen: dict[Any, tuple[int, float]] = {}
    """Requests of each connection, and since when there are as many."""
    while True:
        await asyncio.sleep(min(1.0, limit_s / 4))
        now_s, before, seen = loop.time(), seen, {}
        for connection in server.connections:
            if is_busy(connection):
                continue
            requests, since_s = before.get(connection, (-1, now_s))
            if requests != connection._request_count:
                since_s = now_s
            seen[connection] = connection._request_count, since_s
            if now_s - since_s > limit_s and connection.transport is not None:
                connection.transport.abort()


async def listen(runner: web.AppRunner, host: str, port: int) -> int:
    """Listen at ``host`` and ``port`` (0: any); returns the port. Raises UserError."""
    site = web.TCPSite(runner, host, port, backlog=1024)
    try:
        await site.start()
    except (OSError, OverflowError) as error:
        why = reason_of(error).rpartition("): ")[2]  # asyncio names the address again
        raise UserError(
            f"cannot listen at {host} port {port}: {why}; choose another with --host and --port"
        ) from None
    address = runner.addresses[0]
    return int(address[1])
