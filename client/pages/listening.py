"""Listening for HTTP, as the gateway and the pages do."""

import logging
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from dht.errors import UserError, reason_of

logger = logging.getLogger(__name__)


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
