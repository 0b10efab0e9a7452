"""How one peer takes part in the network, whichever transport carries it."""

import ipaddress
from dataclasses import dataclass
from enum import StrEnum

from dht.errors import UserError
from dht.identity.multiaddr import is_loopback
from dht.identity.peer_id import Identity
from dht.transport.interface import Stream
from dht.transport.metered import ByteMeter

CONNECT_LIMIT_S = 15.0


class TransportKind(StrEnum):
    """What carries a peer's streams."""

    AUTO = "auto"
    """The daemon where hivemind is installed, which it is on Linux; otherwise the light one."""
    DAEMON = "daemon"
    LIGHT = "light"


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportConfig:
    """How one peer takes part in the network."""

    identity: Identity
    kind: TransportKind = TransportKind.AUTO
    port: int = 0
    """TCP port to listen on; 0 takes any free one."""
    host: str = "0.0.0.0"  # noqa: S104  (volunteers serve others)
    """IP address to listen on; 127.0.0.1 for swarms within one machine."""
    host_addresses: tuple[str, ...] = ()
    """Multiaddresses to listen on, instead of ``host`` and ``port``."""
    announce_addresses: tuple[str, ...] = ()
    """What others are told, where that differs from what this machine sees."""
    initial_peers: tuple[str, ...] = ()
    """Full multiaddresses of peers to join; none founds a new network."""
    client_mode: bool = False
    """Listen nowhere, store nothing for others."""
    nat_traversal: bool | None = None
    """Port mapping, AutoNAT and calls through relays; by default where others than this machine
    may call."""
    relays: bool = False
    """Pass calls on for peers that others cannot reach, where NAT is traversed at all."""
    meter: ByteMeter | None = None
    """Told of the bytes that the transport's own streams carry: records, asked for and given."""
    connect_timeout_s: float = CONNECT_LIMIT_S

    def listen_addresses(self) -> tuple[str, ...]:
        """Where to listen; nowhere in client mode. Raises UserError for a malformed host."""
        if self.client_mode:
            return ()
        if self.host_addresses:
            return self.host_addresses
        try:
            version = ipaddress.ip_address(self.host).version
        except ValueError:
            raise UserError(
                f"cannot listen on {self.host!r}: give an IP address of this machine,"
                " or 0.0.0.0 for all"
            ) from None
        return (f"/ip{version}/{self.host}/tcp/{self.port}",)

    def metered(self, protocol: str, stream: Stream) -> Stream:
        """A stream of the transport's own, on the meter where there is one."""
        return stream if self.meter is None else self.meter.stream(protocol, stream)

    def wants_nat_traversal(self) -> bool:
        """Whether to ask routers and relays for reachability."""
        if self.nat_traversal is not None:
            return self.nat_traversal
        if self.client_mode:
            return True  # to dial through relays; it listens nowhere, and asks for nothing
        return not all(is_loopback(address) for address in self.listen_addresses())
