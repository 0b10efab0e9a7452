"""How a peer reaches others: streams by protocol name, and a DHT of dictionaries.

Adapters: :mod:`dht.simulated.network` (tests, simulation), :mod:`dht.daemon.transport` (libp2p
through hivemind's daemon) and :mod:`dht.light.transport` (libp2p in Python alone, for Windows and
macOS). One adapter per process, chosen at start by :mod:`dht.connecting` and imported lazily.
"""

from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

SESSION_PROTOCOL = "/anabranch/session/1"
"""A client's stream to the first stage of its session."""
TOKENS_PROTOCOL = "/anabranch/tokens/1"
"""A client's stream to the last stage, on which sampled tokens arrive."""
HOP_PROTOCOL = "/anabranch/hop/1"
"""A peer's stream to the next peer: opens, activations and ring tokens of all sessions."""
PROBE_PROTOCOL = "/anabranch/probe/1"
"""Receiver-timed bandwidth and round trips."""
PLAN_PROTOCOL = "/anabranch/plan/1"
"""Plan bodies by hash."""
REACH_PROTOCOL = "/anabranch/reach/1"
"""Being dialled back, to learn whether others can."""
RECORDS_PROTOCOL = "/anabranch/records/2"
"""What a full peer knows of the DHT's records, and what it finds there for others."""


class Stream(Protocol):
    """A reliable, ordered, two-way byte stream to one peer."""

    @property
    def remote_peer_id(self) -> str: ...

    @property
    def remote_host(self) -> str:
        """The IP address that an incoming stream's connection comes from, as seen from here;
        empty where that is not known: outgoing streams, relays."""
        ...

    async def read_exactly(self, count: int) -> bytes:
        """Exactly ``count`` bytes; raises NetworkError when the stream ends before."""
        ...

    def write(self, data: bytes) -> None:
        """Queue ``data``. Errors of a dead stream show at the next drain or read."""
        ...

    async def drain(self) -> None:
        """Wait until the stream takes more; raises NetworkError when it is dead."""
        ...

    async def close(self) -> None:
        """Close both directions. Closing twice is harmless; never raises."""
        ...


StreamHandler = Callable[[Stream], Awaitable[None]]


class Transport(Protocol):
    """One peer's presence in the network."""

    @property
    def peer_id(self) -> str: ...

    @property
    def addresses(self) -> tuple[str, ...]:
        """Full multiaddresses (``…/p2p/<peer id>``) under which others reach this peer."""
        ...

    def sign(self, data: bytes) -> bytes:
        """The signature of ``data`` with this peer's key, 64 bytes."""
        ...

    def now(self) -> float:
        """The network's time, in Unix seconds."""
        ...

    async def serve(self, protocol: str, handler: StreamHandler) -> None:
        """Run ``handler`` for each stream that a peer opens on ``protocol``.

        A handler that returns has said its word: the stream is closed once the other side has
        closed it, or after :data:`dht.transport.streams.HEARD_LIMIT_S`. One that closes the stream
        itself, or raises, ends it at once, and what it wrote last may be lost. An error ends that
        stream alone.
        """
        ...

    async def open_stream(
        self, peer_id: str, protocol: str, *, addresses: tuple[str, ...] = ()
    ) -> Stream:
        """Open a stream; ``addresses`` helps where the peer is not known yet.

        Raises NetworkError when the peer cannot be reached within the adapter's time-out.
        """
        ...

    async def store(self, key: str, value: bytes, *, expires_unix_s: float) -> bool:
        """Store ``value`` in dictionary ``key`` under this peer's id; whether anyone took it."""
        ...

    async def get(self, key: str, *, latest: bool = False) -> Mapping[str, bytes]:
        """The newest values of dictionary ``key`` by author's peer id; validated ones only.

        They may be some seconds old; ``latest`` asks others before it answers. Raises NetworkError
        where nobody could be asked.
        """
        ...

    async def wait_ended(self) -> str:
        """Wait until this peer is cut off for good without having been closed; the reason."""
        ...

    async def close(self) -> None:
        """Leave the network and end every process and task that belongs to it."""
        ...
