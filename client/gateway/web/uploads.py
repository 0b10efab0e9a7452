"""Bodies of requests on their way: how many, how long, and how large."""

import asyncio
from collections import Counter
from contextlib import ExitStack, closing
from dataclasses import dataclass

from aiohttp import web

from client.gateway.errors import ApiError, bad_request, too_many
from client.gateway.web.bodies import BODY_BYTES, Body, encoding_of, too_large, unpacked
from dht.budget import Amount, Held


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadsConfig:
    """Bounds of bodies."""

    bytes_max: int = 8 << 20
    """Size of a body, in bytes, as it comes and unpacked."""
    per_address_max: int = 256
    """Requests of one address whose body is still on its way; one more is refused with 429."""
    held: Amount = BODY_BYTES
    """Bytes of those that have come and are not understood yet."""
    time_s: float = 30.0
    """Time for a body to come, in seconds."""


class Uploads:
    """Takes the bodies of requests."""

    def __init__(self, config: UploadsConfig) -> None:
        self._config = config
        self.held = Held(config.held)
        """Bytes that have come and are not understood yet, by address."""
        self.unfinished: Counter[str] = Counter()
        """Requests whose body is still on its way, by address."""

    async def body(self, request: web.Request, address: str, *, any_type: bool = False) -> Body:
        """The body of a request from ``address``, JSON of ``any_type`` or of its own; raises
        ApiError (400, 408, 413, 415, 429)."""
        if not any_type and request.content_type != "application/json":
            said = request.headers.get("Content-Type", "none")[:100]
            raise ApiError(415, f"send 'Content-Type: application/json'; this body's is {said}")
        encoding = encoding_of(request.headers.get("Content-Encoding", ""))
        if self.unfinished[address] >= self._config.per_address_max:
            reason = f"{self.unfinished[address]} unfinished requests come from {address}"
            raise too_many(reason)
        self.unfinished[address] += 1
        try:
            with ExitStack() as failed:
                body = failed.enter_context(closing(Body(held=self.held, address=address)))
                async with asyncio.timeout(self._config.time_s):
                    await self._take(request, body)
                body.hold(unpacked(bytes(body.data), encoding, self._config.bytes_max))
                failed.pop_all()
                return body
        except TimeoutError:
            reason = f"the body did not come within {self._config.time_s:.0f} s"
            raise ApiError(408, reason) from None
        except web.RequestPayloadError as error:
            reason = " ".join(str(error).split())
            raise bad_request(f"the body cannot be read: {reason}") from None
        finally:
            self.unfinished[address] -= 1
            if not self.unfinished[address]:
                del self.unfinished[address]

    async def _take(self, request: web.Request, body: Body) -> None:
        """Read a body as it comes; raises ApiError for one that is too large."""
        data = bytearray()
        async for chunk in request.content.iter_any():
            data += chunk
            if len(data) > self._config.bytes_max:
                raise too_large()
            body.hold(data)
