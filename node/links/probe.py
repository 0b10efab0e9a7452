"""Measures links at their receiver: round trip by pings, bandwidth by timing arriving bytes.

The sender's clock and claims play no part, so a peer can only make a link look slower than it is.
"""

import asyncio
import os
import statistics
from dataclasses import dataclass

from dht.budget import PROBE_BYTES, Budget
from dht.errors import NetworkError, PeerError
from dht.messages import codec
from dht.messages.peer import PEER_BOUNDS, ProbeData, ProbeRequest
from dht.messages.session import Ping, Pong
from dht.messages.types import Link
from dht.transport.interface import PROBE_PROTOCOL, Stream, Transport
from dht.transport.requests import answer, next_request, round_trip_s
from node.links.lent_traffic import LentTraffic


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeConfig:
    """How a link is measured, and how much of it a stranger may ask for."""

    pings: int = 12
    frame_bytes: int = 32 << 10
    first_bytes: int = 128 << 10
    bytes_max: int = 4 << 20
    """Maximum size of a probe, growing by fours: 6.7 MB in all on a long link, 131 kB on a slow
    one."""
    measure_bytes: int = 7 << 20
    """Bytes of all probes of one link, with a margin."""
    fast_bytes: int = 512 << 10
    fast_bytes_per_s: float = 125e6
    """A probe of at least ``fast_bytes`` that arrived whole at 1 Gbit/s is the last one:
    layers are not placed differently for a faster link, while each further probe costs both ends
    processor time."""
    long_s: float = 0.4
    """A probe that took more than ``long_s``, and more than ``long_rtts`` round trips,
    has left its slow start behind."""
    long_rtts: int = 10
    late_s: float = 0.2
    late_rtts: int = 2
    """Length of the timed end of a probe: the longer of these seconds and these round trips."""
    span_s: float = 0.04
    """Minimum span of the timed end with a meaningful rate: bursts come some milliseconds apart."""
    limit_s: float = 10.0


PROBE = ProbeConfig()


class ProbeServer:
    """Answers pings and sends bytes on request, within bounds per peer and in all."""

    def __init__(
        self,
        transport: Transport,
        traffic: LentTraffic | None = None,
        budget: Budget | None = None,
    ) -> None:
        """Who serves another model, or none, gets short probes: its links are of no use here."""
        self._transport = transport
        self._traffic = traffic or LentTraffic()
        self._budget = budget or Budget()
        self._noise = os.urandom(PROBE.frame_bytes)

    async def start(self) -> None:
        await self._transport.serve(PROBE_PROTOCOL, self._serve)

    async def _serve(self, stream: Stream) -> None:
        asked_bytes = 0
        for _ in range(PEER_BOUNDS.requests_max):
            match await next_request(stream, self._budget):
                case Ping(nonce=nonce):
                    await answer(stream, Pong(nonce=nonce))
                case ProbeRequest(size_bytes=size_bytes):
                    asked_bytes += size_bytes
                    if asked_bytes > PEER_BOUNDS.probe_bytes_max:
                        raise codec.MalformedError(f"a probe of {asked_bytes} bytes")
                    if not self._may_send(stream.remote_peer_id, size_bytes):
                        await answer(stream, ProbeData(size_bytes=0))
                        return
                    await self._send(stream, size_bytes)
                case _:
                    raise codec.MalformedError("a probe takes pings and probe requests")

    def _may_send(self, peer_id: str, size_bytes: int) -> bool:
        short = size_bytes <= PROBE.first_bytes or self._budget.parties.member(peer_id)
        now_s = asyncio.get_running_loop().time()
        return (
            short
            and size_bytes <= self._traffic.beside_left_bytes
            and self._budget.rate(PROBE_BYTES).take(peer_id, size_bytes, now_s)
        )

    async def _send(self, stream: Stream, size_bytes: int) -> None:
        noise = memoryview(self._noise)
        for at in range(0, size_bytes, PROBE.frame_bytes):
            size = min(PROBE.frame_bytes, size_bytes - at)
            await self._traffic.wait_up()
            await answer(stream, ProbeData(size_bytes=size), noise[:size])


class MeasuredLinks:
    """The newest probe of each link by its source; the peer's link keeper writes them."""

    def __init__(self) -> None:
        self.links: dict[str, Link] = {}

    def bandwidth_from(self, peer_id: str) -> float | None:
        """Bandwidth of the link from ``peer_id``, in bytes/s; None if it was not probed."""
        link = self.links.get(peer_id)
        return None if link is None else link.bandwidth_bytes_per_s


async def measure_link(transport: Transport, peer_id: str, addresses: tuple[str, ...] = ()) -> Link:
    """Measure the link from ``peer_id`` to this peer, with ``PROBE.measure_bytes`` at most.

    Bandwidth is the rate at which the end of a probe arrived. Probes grow until one took long
    enough to leave TCP's slow start behind, or the peer sends no more. Raises NetworkError if the
    peer does not answer in time, or sends nothing.
    """
    try:
        async with asyncio.timeout(PROBE.limit_s):
            stream = await transport.open_stream(peer_id, PROBE_PROTOCOL, addresses=addresses)
            try:
                rtt_s = min([await round_trip_s(stream, nonce) for nonce in range(PROBE.pings)])
                bandwidth = await _bandwidth(stream, rtt_s)
            finally:
                await stream.close()
    except TimeoutError:
        raise NetworkError(
            f"peer {peer_id} did not finish a probe in {PROBE.limit_s:.0f} s"
        ) from None
    except PeerError as error:
        raise NetworkError(f"peer {peer_id} broke the probe: {error}") from error
    return Link(
        source=peer_id,
        target=transport.peer_id,
        bandwidth_bytes_per_s=bandwidth,
        rtt_s=rtt_s,
        measured_unix_s=transport.now(),
    )


async def _bandwidth(stream: Stream, rtt_s: float) -> float:
    """Bytes/s of the last probe; of a fast link, those of the whole probe with its round trip."""
    loop = asyncio.get_running_loop()
    size_bytes, rate = PROBE.first_bytes, 0.0
    while True:
        started_s = loop.time()
        await codec.send_frame(stream, ProbeRequest(size_bytes=size_bytes))
        arrivals_s: list[float] = []
        for _ in range(0, size_bytes, PROBE.frame_bytes):
            frame = await codec.read_frame(stream, limit_bytes=PROBE.frame_bytes + 1024)
            if frame.message == ProbeData(size_bytes=0) and not frame.body and not arrivals_s:
                break
            if not isinstance(frame.message, ProbeData) or len(frame.body) != PROBE.frame_bytes:
                raise codec.MalformedError("a probe was answered with something else")
            arrivals_s.append(loop.time())
        if not arrivals_s:
            break
        took_s = max(arrivals_s[-1] - started_s, 1e-6)
        if size_bytes >= PROBE.fast_bytes and size_bytes / took_s >= PROBE.fast_bytes_per_s:
            return size_bytes / took_s
        if took_s > max(PROBE.long_s, PROBE.long_rtts * rtt_s) or size_bytes >= PROBE.bytes_max:
            return late_rate(arrivals_s, max(PROBE.late_s, PROBE.late_rtts * rtt_s))
        rate = size_bytes / took_s
        size_bytes = min(4 * size_bytes, PROBE.bytes_max)
    if not rate:
        raise NetworkError("it sends no more probes now")
    return rate


def late_rate(arrivals_s: list[float], window_s: float) -> float:
    """Rate, in bytes/s, at which the end of a probe arrived.

    The frames that count are those of the last ``window_s``: at most half of all, which leaves out
    the slow start, and at least a quarter. Their rate is that of the median span of a few frames. A
    stream on a long link pauses now and then for a round trip, until its flow-control window is
    reopened, and such a pause says nothing about the link. Spans take ``PROBE.span_s`` or more, to
    even out bursts; if all frames arrive sooner, they are one span.
    """
    frames, end_s = len(arrivals_s), arrivals_s[-1]
    within = sum(at_s > end_s - window_s for at_s in arrivals_s)
    counted = min(max(within, frames // 4), frames // 2)
    late_s = arrivals_s[-1 - counted :]
    for span in range(1, counted // 2 + 1):
        median_s = statistics.median(
            end_s - start_s for start_s, end_s in zip(late_s, late_s[span:], strict=False)
        )
        if median_s >= PROBE.span_s:
            return span * PROBE.frame_bytes / median_s
    return counted * PROBE.frame_bytes / max(late_s[-1] - late_s[0], 1e-6)
