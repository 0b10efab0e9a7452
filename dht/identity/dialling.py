"""Decides at which addresses a peer is dialled. Pure, for every transport.

Peers write their addresses themselves, so a stranger can have others knock at any door: a printer
in their home, a service of their own machine, somebody else's server. Only IP addresses with TCP
are dialled for a stranger: no names, which say later what they mean, and no UDP, which answers one
request with many packets. And a peer of the public network dials nothing that is nearer.
"""

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import IntEnum

from dht.identity.multiaddr import circuits_of, dialled_of, host_of
from dht.messages.types import RECORD_BOUNDS

_LOCAL_NAMES = (".local", ".lan", ".home", ".home.arpa", ".internal", ".test")


class Scope(IntEnum):
    """The distance from which an address can be used; larger ones from further away."""

    MACHINE = 0
    """Within one machine: loopback."""
    LOCAL = 1
    """Within a home, a lab or an overlay of one owner: private addresses."""
    PUBLIC = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class DialRule:
    """The addresses at which one peer dials others."""

    nearest: Scope = Scope.PUBLIC
    """The nearest scope that is dialled for strangers."""
    given: frozenset[str] = frozenset()
    """Full addresses that the peer's owner gave, which are always dialled."""

    @classmethod
    def of(cls, given: Iterable[str], own: Iterable[str]) -> "DialRule":
        """The rule of a peer whose owner gave the addresses ``given`` to join through, and which
        listens on, or is announced at, ``own``.

        The farthest of all these addresses shows how far the peer's network reaches. A router that
        forwards a port to a peer does not count: it says nothing of the network that was joined.
        """
        kept = frozenset(given)
        scopes = [scope_of_given(each) for each in kept]
        scopes += [scope_of_host(host_of(each)) for each in own]
        known = [scope for scope in scopes if scope is not None]
        return cls(nearest=max(known, default=Scope.PUBLIC), given=kept)

    def seen_at(self, hosts: Iterable[str]) -> "DialRule":
        """The rule once hosts are known at which this peer is reached, or which reached it.

        They count for a peer that founded its network alone, as its owner named nobody.
        """
        if self.given or self.nearest is Scope.PUBLIC:
            return self
        scopes = [scope for host in hosts if (scope := scope_of_host(host)) is not None]
        return replace(self, nearest=max([self.nearest, *scopes]))

    def admitted(self, peer_id: str, addresses: tuple[str, ...]) -> tuple[str, ...]:
        """The full addresses of ``peer_id`` that may be dialled, of the first
        ``RECORD_BOUNDS.addresses_max`` that were told.

        One through a relay counts as the relay's, which is dialled.
        """
        return tuple(
            each for each in addresses[: RECORD_BOUNDS.addresses_max] if self._admits(peer_id, each)
        )

    def _admits(self, peer_id: str, address: str) -> bool:
        if address in self.given:
            return address.rstrip("/").endswith(f"/p2p/{peer_id}")
        if not dialled_of(peer_id, (address,)) and not circuits_of(peer_id, (address,)):
            return False
        scope = scope_of_host(address.split("/")[2])
        return scope is not None and scope >= self.nearest


def scope_of_host(host: str) -> Scope | None:
    """The scope of an IP address; None for a name, and for what is no single host's address.

    Link-local addresses are of no use without an interface, and clouds keep their machines' secrets
    behind one. An IPv6 address that stands for an IPv4 address counts as that one.
    """
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return None
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.teredo is not None or ip.scope_id is not None:
            return None
        ip = ip.ipv4_mapped or ip.sixtofour or ip
    if ip.is_loopback:
        return Scope.MACHINE
    if ip.is_unspecified or ip.is_multicast or ip.is_link_local or ip.is_reserved:
        return None
    if ip.version == 4 and ip in ipaddress.ip_network("0.0.0.0/8"):  # this machine, to some systems
        return None
    return Scope.PUBLIC if ip.is_global else Scope.LOCAL


def scope_of_given(address: str) -> Scope | None:
    """The scope of an address that a peer's owner gave, where names count as well."""
    kind, _, rest = address.lstrip("/").partition("/")
    host = rest.partition("/")[0]
    if not kind.startswith("dns"):
        return scope_of_host(host)
    if host == "localhost":
        return Scope.MACHINE
    return Scope.LOCAL if "." not in host or host.endswith(_LOCAL_NAMES) else Scope.PUBLIC
