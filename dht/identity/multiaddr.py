"""Parses multiaddresses as text into a peer and an address to dial. Pure, for every transport."""

import ipaddress
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

from dht.errors import NetworkError, UserError
from dht.identity.peer_id import is_peer_id
from dht.messages.types import RECORD_BOUNDS

Where = TypeVar("Where")
CIRCUIT = "/p2p-circuit"
_HOSTS = frozenset({"ip4", "ip6", "dns", "dns4", "dns6"})
_DIALLED = re.compile(r"\[\S+\] dial \S+ \S+ (connect: )?")
"""How libp2p's daemon says which address it dialled."""
_LOOKS_LIKE = "it looks like /ip4/1.2.3.4/tcp/31337/p2p/12D3KooW…"


def unanswered(initial_peers: Sequence[str], reasons: Sequence[str]) -> NetworkError:
    """The error for initial peers of which none answers, with the same text in all commands.

    Of several addresses the first is named, and each reason once, without libp2p's own words.
    """
    # libp2p's daemon repeats its message three times before the reasons, one for each address.
    found = (reason.rpartition("all dials failed")[2].strip(" *\n") or reason for reason in reasons)
    whys = dict.fromkeys(_DIALLED.sub("", why) for each in found for why in each.split(" * "))
    where, *others = initial_peers
    asked = "is that peer running, and is this the address that it printed last?"
    if others:
        more = len(others)
        where += f" or {more} more {'address' if more == 1 else 'addresses'}"
        asked = "is one of these peers running, and are these the addresses that they printed last?"
    return NetworkError(f"nobody answers at {where} ({'; '.join(whys)}): {asked}")


def split(address: str) -> tuple[str, str]:
    """The peer id at the end of a full multiaddress and the TCP address before it.

    Raises ValueError for other text, and for addresses through a relay.
    """
    head, found, peer_id = address.rstrip("/").rpartition("/p2p/")
    if not found or not head:
        raise ValueError("it lacks the peer id at its end, /p2p/12D3KooW…")
    if not is_peer_id(peer_id):
        raise ValueError(f"{peer_id[:64]!r} is no peer id")
    return peer_id, checked_tcp(head)


def checked_tcp(address: str) -> str:
    """Return an address like ``/ip4/HOST/tcp/PORT`` unchanged; raises ValueError for any other."""
    parts = address.split("/")
    if len(parts) != 5 or parts[0] or parts[1] not in _HOSTS or parts[3] != "tcp":
        raise ValueError("only /ip4, /ip6 and /dns with /tcp can be dialled directly")
    if not parts[4].isascii() or not parts[4].isdigit() or not 0 <= int(parts[4]) <= 65_535:
        raise ValueError(f"{parts[4][:16]!r} is no TCP port")
    if not parts[2] or not parts[2].isascii() or len(parts[2]) > 253:
        raise ValueError(f"{parts[2][:64]!r} is no host")
    return address


def tcp_address(text: str) -> str:
    """``HOST:PORT``, with an IPv6 address in brackets, as a multiaddress; raises ValueError.

    A multiaddress with TCP stays as it is.
    """
    if text.startswith("/"):
        return checked_tcp(text)
    host, colon, port = text.rpartition(":")
    if not colon or "/" in host:
        raise ValueError("it must be HOST:PORT, such as 203.0.113.7:31337")
    if port and not port.strip("0"):
        raise ValueError("others dial a port of 1 or more")
    bare = host.removeprefix("[").removesuffix("]")
    try:
        kind = f"ip{ipaddress.ip_address(bare).version}"
    except ValueError:
        if ":" in bare:
            raise ValueError(f"{bare[:64]!r} is no host") from None
        kind = "dns"
    return checked_tcp(f"/{kind}/{bare}/tcp/{port}")


def by_peer(
    addresses: tuple[str, ...], parse: Callable[[str], tuple[str, Where]]
) -> dict[str, tuple[Where, ...]]:
    """Addresses to dial by peer id, each parsed by ``parse``; raises UserError where it fails."""
    peers: dict[str, tuple[Where, ...]] = {}
    for address in addresses:
        try:
            peer_id, where = parse(address)
        except ValueError as error:
            raise UserError(
                f"{address!r} is no address of a peer: {error}; {_LOOKS_LIKE}"
            ) from error
        peers[peer_id] = (*peers.get(peer_id, ()), where)
    return peers


def split_all(addresses: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """TCP addresses to dial by peer id; raises UserError for a malformed address."""
    return by_peer(addresses, split)


def dialled_of(peer_id: str, addresses: tuple[str, ...]) -> tuple[str, ...]:
    """Addresses to dial ``peer_id`` among those that another peer told; others are skipped."""
    found = []
    for address in addresses[: RECORD_BOUNDS.addresses_max]:
        try:
            named, dialled = split(address)
        except ValueError:
            continue
        if named == peer_id:
            found.append(dialled)
    return tuple(found)


def circuits_of(peer_id: str, addresses: tuple[str, ...]) -> tuple[str, ...]:
    """Addresses of ``peer_id`` through relays among those that another peer told.

    Others are skipped. Each is the relay's full address and ``/p2p-circuit``, which
    :func:`split_circuit` splits.
    """
    found = []
    for address in addresses[: RECORD_BOUNDS.addresses_max]:
        head, between, named = address.rpartition(f"{CIRCUIT}/p2p/")
        with suppress(ValueError):
            if between and named == peer_id and split(head)[0] != peer_id:
                found.append(head + CIRCUIT)
    return tuple(found)


def split_circuit(address: str) -> tuple[str, str] | None:
    """The relay's peer id and TCP address; None for an address to dial directly."""
    return split(address.removesuffix(CIRCUIT)) if address.endswith(CIRCUIT) else None


def ranked(addresses: list[str]) -> tuple[str, ...]:
    """The TCP addresses, loopback last, ``RECORD_BOUNDS.addresses_max`` at most."""
    tcp = [address for address in addresses if "/tcp/" in address]
    return tuple(sorted(tcp, key=is_loopback)[: RECORD_BOUNDS.addresses_max])


def is_loopback(address: str) -> bool:
    """Whether only this machine can use a multiaddress."""
    return address.startswith(("/ip4/127.", "/ip6/::1/"))


def host_of(address: str) -> str:
    """The IP address of a multiaddress; empty for names, relays and everything else."""
    parts = address.split("/")
    if len(parts) < 3 or parts[1] not in {"ip4", "ip6"} or "p2p-circuit" in parts:
        return ""
    return parts[2]
