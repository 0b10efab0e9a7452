"""The transport interface: streams by protocol name, and a DHT of dictionaries.

Adapters are :mod:`dht.daemon.transport` (libp2p through hivemind's daemon) and
:mod:`dht.light.transport` (libp2p in Python alone, for Windows and macOS). A process has one
adapter, chosen at start by :mod:`dht.networks.connecting` and imported lazily. Tests and benchmarks
have one of their own, :mod:`testing.network`.
"""

import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

SESSION_PROTOCOL = "/anabranch/session/1"
"""A client's stream to the first stage of its session."""
TOKENS_PROTOCOL = "/anabranch/tokens/1"
"""A client's stream to the last stage, on which sampled tokens arrive."""
HOP_PROTOCOL = "/anabranch/hop/1"
"""A peer's stream to the next peer: opens, activations and ring tokens of all sessions."""
PROBE_PROTOCOL = "/anabranch/probe/1"
"""Measurement of bandwidth and round trips, timed by the receiver."""
PLAN_PROTOCOL = "/anabranch/plan/1"
"""Plan bodies by hash, pings and witness requests."""
REACH_PROTOCOL = "/anabranch/reach/1"
"""Requests to be dialled back, to learn whether others can reach this peer."""
LAYERS_PROTOCOL = "/anabranch/layers/1"
"""Requests to show that layers are held, by running rows through them."""
RECORDS_PROTOCOL = "/anabranch/records/2"
"""Requests to a full peer for records of the DHT, and to store them."""

TEXT_PROTOCOL = "/anabranch/text/1"
"""A model's small text files, by hash."""
RELAY_PROTOCOL = "/libp2p/circuit/relay/0.2.0/hop"
"""libp2p's circuit relay v2: slots at a relay, and calls through it."""
RELAY_STOP_PROTOCOL = "/libp2p/circuit/relay/0.2.0/stop"
"""A relay's stream to the peer that is called; libp2p itself answers it."""

OPEN_LIMIT_S = 10.0
"""Time limit for opening a stream, in every transport."""

SESSION_PROTOCOLS = frozenset({SESSION_PROTOCOL, TOKENS_PROTOCOL, HOP_PROTOCOL})
"""Streams that carry sessions, which have rules of their own; all else is beside them."""


class Stream(Protocol):
    """A reliable, ordered, two-way byte stream to one peer."""

    @property
    def remote_peer_id(self) -> str: ...

    @property
    def remote_host(self) -> str:
        """The IP address that an incoming stream comes from, as seen from here.

        Empty where it is unknown: for outgoing streams and streams through relays.
        """
        ...

    async def read_exactly(self, count: int) -> bytes:
        """Read exactly ``count`` bytes; raises NetworkError when the stream ends before."""
        ...

    async def read_some(self, most: int) -> bytes:
        """Read at least one byte, ``most`` at most; raises NetworkError when the stream ends."""
        ...

    def write(self, data: bytes) -> None:
        """Queue ``data``. The next drain or read raises the error of a dead stream."""
        ...

    async def drain(self) -> None:
        """Wait until the stream can take more; raises NetworkError when it is dead."""
        ...

    async def close(self) -> None:
        """Close both directions. Closing twice is harmless; never raises."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Contact:
    """When others last showed that they know this peer, by the loop's clock; never: minus infinity.

    Nothing here is this peer's own word.
    """

    returned_s: float = -math.inf
    """Another peer gave this peer's own record back."""
    answered_s: float = -math.inf
    """Another peer answered a request for records."""
    called_s: float = -math.inf
    """Another peer opened a stream to this one."""
    known_s: float = -math.inf
    """One that is no stranger (:meth:`dht.budget.Parties.knows`) answered, or opened a stream."""
    others: int = 0
    """Peers that should know this one: those with living records, and those met lately that did not
    say that they leave."""

    @property
    def last_s(self) -> float:
        """The last sign that others see this peer, which a stranger's call or answer is not."""
        return max(self.returned_s, self.known_s)


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

    @property
    def clock_note(self) -> str:
        """What is wrong with this machine's clock, for people; empty where nothing is known."""
        ...

    async def serve(self, protocol: str, handler: StreamHandler) -> None:
        """Run ``handler`` for each stream that a peer opens on ``protocol``.

        After the handler returns, the stream is closed once the other side has closed it, or after
        ``PIPES.heard_limit_s``. A handler that closes the stream itself, or
        raises, ends it at once, and its last writes may be lost. An error ends that stream alone.
        """
        ...

    async def open_stream(
        self, peer_id: str, protocol: str, *, addresses: tuple[str, ...] = ()
    ) -> Stream:
        """Open a stream; ``addresses`` are used where the peer is not known yet.

        Raises NetworkError when the peer cannot be reached within the adapter's time-out.
        """
        ...

    async def store(self, key: str, value: bytes, *, expires_unix_s: float) -> bool:
        """Store ``value`` in dictionary ``key`` under this peer's id.

        Returns whether any peer took it.
        """
        ...

    async def get(self, key: str, *, latest: bool = False) -> Mapping[str, bytes]:
        """The newest valid values of dictionary ``key``, by author's peer id.

        They may be some seconds old; with ``latest``, other peers are asked first. Raises
        NetworkError where no peer could be asked.
        """
        ...

    def contact(self) -> Contact:
        """When others last showed that they know this peer."""
        ...

    def rejoin(self) -> None:
        """Greet everybody who is missing, soon: this peer seems to be cut off."""
        ...

    async def wait_ended(self) -> str:
        """Wait until this peer is cut off for good without :meth:`close`; returns the reason.

        Raises MachineError where a loop of the transport's own failed again and again.
        """
        ...

    async def close(self) -> None:
        """Leave the network and end all its processes and tasks."""
        ...
