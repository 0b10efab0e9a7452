"""Configuration of a peer's transport, the same for all adapters."""

import ipaddress
import socket
from dataclasses import dataclass, field
from enum import StrEnum

from dht.budget import Budget
from dht.errors import UserError
from dht.identity.multiaddr import checked_tcp, is_loopback
from dht.identity.peer_id import Identity
from dht.process.supervision import Supervisor
from dht.transport.interface import Stream
from dht.transport.metered import ByteMeter

CONNECT_LIMIT_S = 15.0
ANY_HOSTS = frozenset({"0.0.0.0", "::"})  # noqa: S104


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnAddressConfig:
    """How often a peer looks where it is."""

    look_s: float = 15.0
    """Interval between two looks at its addresses: networks and port mappings change."""


OWN_ADDRESS = OwnAddressConfig()


class TransportKind(StrEnum):
    """The adapter that carries a peer's streams."""

    AUTO = "auto"
    """The daemon where hivemind is installed, as on Linux; otherwise the light transport."""
    DAEMON = "daemon"
    LIGHT = "light"


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportConfig:
    """Options of one peer's transport."""

    identity: Identity
    kind: TransportKind = TransportKind.AUTO
    port: int = 0
    """TCP port to listen on; 0: any free one."""
    host: str = "0.0.0.0"  # noqa: S104  (volunteers serve others)
    """IP address to listen on; 127.0.0.1 for swarms within one machine."""
    host_addresses: tuple[str, ...] = ()
    """Multiaddresses to listen on, instead of ``host`` and ``port``."""
    announce_addresses: tuple[str, ...] = ()
    """Addresses announced to others, where they differ from those that this machine sees."""
    initial_peers: tuple[str, ...] = ()
    """Full multiaddresses of peers to join; empty: found a new network."""
    remembered_peers: tuple[str, ...] = ()
    """Addresses of peers of this network that are remembered: greeted again and again, as far as
    they may be dialled, while they are away."""
    client_mode: bool = False
    """Whether to listen nowhere and store nothing for others."""
    nat_traversal: bool | None = None
    """Whether to use port mapping, AutoNAT and relays; None: unless it listens on loopback only."""
    relays: bool = False
    """Whether to relay for peers that others cannot reach; only with NAT traversal."""
    meter: ByteMeter | None = None
    """Meter of the bytes on the transport's own streams: requests for records and answers."""
    budget: Budget = field(default_factory=Budget)
    """Bounds on what other peers may take of this process."""
    parts: Supervisor = field(default_factory=Supervisor)
    """Keeps the transport's own loops running."""
    connect_timeout_s: float = CONNECT_LIMIT_S

    def listen_addresses(self) -> tuple[str, ...]:
        """Addresses to listen on; none in client mode.

        Raises UserError for a malformed host, and for any address but one with TCP.
        """
        if self.client_mode:
            return ()
        for address in (*self.host_addresses, *self.announce_addresses):
            try:
                checked_tcp(address)
            except ValueError as error:
                raise UserError(f"cannot listen on {address}: {error}") from error
        return self.host_addresses or (listen_address(self.host, self.port),)

    async def pause(self) -> None:
        """Wait until bytes that are not urgent may leave, as the owner lends the connection."""
        if self.meter is not None:
            await self.meter.pause()

    def metered(self, protocol: str, stream: Stream, *, served: bool = False) -> Stream:
        """``stream``, one of the transport's own, on the meter if there is one.

        ``served``: another peer opened it.
        """
        if self.meter is None:
            return stream
        return self.meter.stream(protocol, stream, served=served)

    def wants_nat_traversal(self) -> bool:
        """Whether to ask routers and relays for reachability."""
        if self.nat_traversal is not None:
            return self.nat_traversal
        if self.client_mode:
            return True  # needed to dial through relays; a client listens nowhere
        return not all(is_loopback(address) for address in self.listen_addresses())


def listen_address(host: str, port: int) -> str:
    """The multiaddress to listen on at an IP address of this machine, of either version; raises
    UserError for any other host."""
    try:
        version: int = ipaddress.ip_address(host).version
    except ValueError:
        version = 0
    if not version or "%" in host:
        raise UserError(
            f"cannot listen on {host[:80]!r}: --host takes an IP address of this machine, or"
            " 0.0.0.0 (IPv4) or :: (IPv6) for all"
        )
    return f"/ip{version}/{host}/tcp/{port}"


def any_host() -> str:
    """``0.0.0.0``, or ``::`` on a machine whose only addresses that others reach are IPv6."""
    kinds = {
        "ip4" if "/ip4/" in each else "ip6"
        for each in expanded(("/ip4/0.0.0.0/tcp/0", "/ip6/::/tcp/0"))
        if not is_loopback(each)
    }
    return "::" if kinds == {"ip6"} else "0.0.0.0"  # noqa: S104  others must reach a peer


def expanded(bound: tuple[str, ...]) -> list[str]:
    """The listen addresses with wildcard hosts replaced by each of this machine's addresses."""
    import psutil

    found: list[str] = []
    for address in bound:
        _, family, host, _, port = address.split("/")
        if host not in ANY_HOSTS:
            found.append(address)
            continue
        wanted = socket.AF_INET if family == "ip4" else socket.AF_INET6
        for addresses in psutil.net_if_addrs().values():
            found += [
                f"/{family}/{each.address}/tcp/{port}"
                for each in addresses
                if each.family == wanted and "%" not in each.address  # link-local ones have it
            ]
    return found
