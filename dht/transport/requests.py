"""Serves a stream of requests and answers: neither side may keep the other waiting for ever."""

import asyncio
from typing import Any

from dht.budget import REQUESTS, Budget
from dht.errors import NetworkError
from dht.messages import codec
from dht.transport.interface import Stream

REQUEST_BYTES_MAX = 1 << 10
SILENCE_LIMIT_S = 60.0
"""Time limit for the next request; who asks in intervals opens another stream."""
SEND_LIMIT_S = 10.0
"""Time limit for the asker to take one answer."""


async def next_request(stream: Stream, budget: Budget) -> Any:
    """The next request, at most ``REQUEST_BYTES_MAX``.

    Raises NetworkError where the asker has had its share of requests, TimeoutError after
    ``SILENCE_LIMIT_S``, and as :func:`dht.messages.codec.read_frame`.
    """
    async with asyncio.timeout(SILENCE_LIMIT_S):
        message = (await codec.read_frame(stream, limit_bytes=REQUEST_BYTES_MAX)).message
    now_s = asyncio.get_running_loop().time()
    if not budget.rate(REQUESTS).take(stream.remote_peer_id, 1, now_s):
        raise NetworkError("this peer took its share of requests")
    return message


async def answer(stream: Stream, message: object, body: bytes | memoryview = b"") -> None:
    """Send an answer. Raises TimeoutError where it is not taken in ``SEND_LIMIT_S``."""
    async with asyncio.timeout(SEND_LIMIT_S):
        await codec.send_frame(stream, message, body)
