"""Requests and answers on a stream: asked, and served so that neither side may keep the other
waiting for ever."""

import asyncio
from dataclasses import dataclass
from typing import Any

from dht.budget import REQUESTS, Budget
from dht.errors import NetworkError
from dht.messages import codec
from dht.messages.session import Ping, Pong
from dht.transport.interface import Stream, Transport


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestsConfig:
    """How long one side waits for the other, and how long a request is."""

    request_bytes_max: int = 1 << 10
    silence_limit_s: float = 60.0
    """Time limit for the next request; who asks in intervals opens another stream."""
    send_limit_s: float = 10.0
    """Time limit for the asker to take one answer."""


REQUESTS_ON_STREAMS = RequestsConfig()


async def ask(
    transport: Transport,
    peer_id: str,
    protocol: str,
    request: object,
    *,
    addresses: tuple[str, ...] = (),
    limit_bytes: int = 1 << 10,
) -> codec.Frame:
    """A peer's answer to one request, on a stream of its own.

    Raises as :meth:`dht.transport.interface.Transport.open_stream` and
    :func:`dht.messages.codec.read_frame`.
    """
    stream = await transport.open_stream(peer_id, protocol, addresses=addresses)
    try:
        await codec.send_frame(stream, request)
        return await codec.read_frame(stream, limit_bytes=limit_bytes)
    finally:
        await stream.close()


async def round_trip_s(stream: Stream, nonce: int = 1) -> float:
    """The time of one ping in seconds. Raises NetworkError, and MalformedError for another
    answer."""
    loop = asyncio.get_running_loop()
    started_s = loop.time()
    await codec.send_frame(stream, Ping(nonce=nonce))
    reply = (await codec.read_frame(stream, limit_bytes=1 << 10)).message
    if reply != Pong(nonce=nonce):
        raise codec.MalformedError("a ping was answered with something else")
    return loop.time() - started_s


async def next_request(stream: Stream, budget: Budget) -> Any:
    """The next request, at most ``REQUESTS_ON_STREAMS.request_bytes_max``.

    Raises NetworkError where the asker has had its share of requests, TimeoutError after
    ``REQUESTS_ON_STREAMS.silence_limit_s``, and as :func:`dht.messages.codec.read_frame`.
    """
    async with asyncio.timeout(REQUESTS_ON_STREAMS.silence_limit_s):
        message = (
            await codec.read_frame(stream, limit_bytes=REQUESTS_ON_STREAMS.request_bytes_max)
        ).message
    now_s = asyncio.get_running_loop().time()
    if not budget.rate(REQUESTS).take(stream.remote_peer_id, 1, now_s):
        raise NetworkError("this peer took its share of requests")
    return message


async def answer(stream: Stream, message: object, body: bytes | memoryview = b"") -> None:
    """Send an answer. Raises TimeoutError where it is not taken in
    ``REQUESTS_ON_STREAMS.send_limit_s``."""
    async with asyncio.timeout(REQUESTS_ON_STREAMS.send_limit_s):
        await codec.send_frame(stream, message, body)
