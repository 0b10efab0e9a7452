"""Counts bytes on streams, by purpose. Bytes that the DHT's daemon itself sends are not counted."""

from collections import Counter
from collections.abc import Awaitable, Callable

from dht.transport.interface import (
    PROBE_PROTOCOL,
    RELAY_PROTOCOL,
    RELAY_STOP_PROTOCOL,
    SESSION_PROTOCOLS,
    Stream,
    StreamHandler,
    Transport,
)

CountBytes = Callable[[int], None]
CountOthers = Callable[[str, int], None]
"""Counts bytes of a stream that another peer opened, by its id; raises NetworkError to end it."""


async def no_pause() -> None:
    """Wait for nothing."""


class MeteredStream:
    """A stream that reports bytes as they are written and read."""

    def __init__(self, inner: Stream, sent: CountBytes, received: CountBytes) -> None:
        self._inner = inner
        self._sent = sent
        self._received = received
        self.remote_peer_id, self.remote_host = inner.remote_peer_id, inner.remote_host
        self.drain, self.close = inner.drain, inner.close

    async def read_exactly(self, count: int) -> bytes:
        data = await self._inner.read_exactly(count)
        self._received(count)
        return data

    async def read_some(self, most: int) -> bytes:
        data = await self._inner.read_some(most)
        self._received(len(data))
        return data

    def write(self, data: bytes) -> None:
        self._sent(len(data))
        self._inner.write(data)


class ByteMeter:
    """Calls ``sent`` and ``received`` with the bytes of all its streams."""

    def __init__(self, sent: CountBytes, received: CountBytes) -> None:
        self._sent = sent
        self._received = received
        self.purposes: Counter[str] = Counter()
        """Bytes sent and received, by the middle of the protocol's name, for example ``hop``."""
        self.beside: CountOthers = lambda peer_id, count: None
        """Also told of the bytes of streams that others open for anything but sessions, of relayed
        calls and of probes."""
        self.pause: Callable[[], Awaitable[None]] = no_pause
        """Waits until bytes that are not urgent may leave."""

    def stream(self, protocol: str, inner: Stream, *, served: bool = False) -> Stream:
        """``inner`` with its bytes counted by the purpose of ``protocol``.

        ``served``: another peer opened it.
        """
        relayed = protocol in {RELAY_PROTOCOL, RELAY_STOP_PROTOCOL}
        purpose = "relay" if relayed else protocol.strip("/").split("/")[-2]
        for_links = relayed or protocol == PROBE_PROTOCOL
        beside = for_links or (served and protocol not in SESSION_PROTOCOLS)

        def counted(count_bytes: CountBytes) -> CountBytes:
            def count(size_bytes: int) -> None:
                self.purposes[purpose] += size_bytes
                count_bytes(size_bytes)
                if beside:
                    self.beside(inner.remote_peer_id, size_bytes)

            return count

        return MeteredStream(inner, counted(self._sent), counted(self._received))


class MeteredTransport:
    """``inner`` with ``meter`` on all streams opened and served through it."""

    def __init__(self, inner: Transport, meter: ByteMeter) -> None:
        self._inner = inner
        self._meter = meter
        self.peer_id = inner.peer_id
        self.sign, self.now = inner.sign, inner.now
        self.store, self.get = inner.store, inner.get
        self.contact, self.rejoin = inner.contact, inner.rejoin
        self.wait_ended, self.close = inner.wait_ended, inner.close

    @property
    def addresses(self) -> tuple[str, ...]:
        return self._inner.addresses

    @property
    def clock_note(self) -> str:
        return self._inner.clock_note

    async def serve(self, protocol: str, handler: StreamHandler) -> None:
        async def run(stream: Stream) -> None:
            await handler(self._meter.stream(protocol, stream, served=True))

        await self._inner.serve(protocol, run)

    async def open_stream(
        self, peer_id: str, protocol: str, *, addresses: tuple[str, ...] = ()
    ) -> Stream:
        stream = await self._inner.open_stream(peer_id, protocol, addresses=addresses)
        return self._meter.stream(protocol, stream)
