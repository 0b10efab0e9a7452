"""Links measured by their receiver: round trip by pings, bandwidth by timing arriving bytes.

The sender's clock and claims play no part, so a peer can only make a link look slower than it is.
"""

import asyncio
import os

from dht import wire
from dht.errors import NetworkError, PeerError
from dht.messages import Ping, Pong, ProbeData, ProbeRequest
from dht.transport import PROBE_PROTOCOL, Stream, Transport
from dht.types import Link

PINGS = 3
PROBE_BYTES = 256 << 10
REQUESTS_MAX = 16
"""Requests that one stream may make: a probe is no way to make others upload for ever."""
PROBE_S = 5.0


class ProbeServer:
    """Answers pings and sends bytes on request, within bounds."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._noise = os.urandom(PROBE_BYTES)

    async def start(self) -> None:
        """Accept probe streams."""
        await self._transport.serve(PROBE_PROTOCOL, self._serve)

    async def _serve(self, stream: Stream) -> None:
        for _ in range(REQUESTS_MAX):
            message = (await wire.read_frame(stream, limit_bytes=1 << 10)).message
            match message:
                case Ping(nonce=nonce):
                    await wire.send_frame(stream, Pong(nonce=nonce))
                case ProbeRequest(size_bytes=size_bytes):
                    body = memoryview(self._noise)[: min(size_bytes, PROBE_BYTES)]
                    await wire.send_frame(stream, ProbeData(size_bytes=len(body)), body)
                case _:
                    raise wire.MalformedError("a probe takes pings and probe requests")


async def measure_link(transport: Transport, peer_id: str, addresses: tuple[str, ...] = ()) -> Link:
    """Measure the link from ``peer_id`` to this peer.

    Bandwidth is the probe's bytes over the time from its request to its last byte, less one round
    trip; it is a lower bound. Raises NetworkError when the peer does not answer in time.
    """
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(PROBE_S):
            stream = await transport.open_stream(peer_id, PROBE_PROTOCOL, addresses=addresses)
            try:
                rtt_s = min([await _ping(stream, nonce) for nonce in range(PINGS)])
                started_s = loop.time()
                await wire.send_frame(stream, ProbeRequest(size_bytes=PROBE_BYTES))
                frame = await wire.read_frame(stream, limit_bytes=PROBE_BYTES + 1024)
                took_s = loop.time() - started_s
            finally:
                await stream.close()
    except TimeoutError:
        raise NetworkError(f"peer {peer_id} did not finish a probe in {PROBE_S:.0f} s") from None
    except PeerError as error:
        raise NetworkError(f"peer {peer_id} broke the probe: {error}") from error
    transfer_s = max(took_s - rtt_s, took_s * 0.1, 1e-6)
    return Link(
        source=peer_id,
        target=transport.peer_id,
        bandwidth_bytes_per_s=len(frame.body) / transfer_s,
        rtt_s=rtt_s,
        measured_unix_s=transport.now(),
    )


async def _ping(stream: Stream, nonce: int) -> float:
    """One round trip in seconds."""
    loop = asyncio.get_running_loop()
    started_s = loop.time()
    await wire.send_frame(stream, Ping(nonce=nonce))
    reply = (await wire.read_frame(stream, limit_bytes=1 << 10)).message
    if reply != Pong(nonce=nonce):
        raise wire.MalformedError("a ping was answered with something else")
    return loop.time() - started_s
