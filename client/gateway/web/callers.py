"""Names and addresses that requests come by. Pure."""

from collections.abc import Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from urllib.parse import urlsplit

from dht.errors import UserError


def hosts_of(listens_at: str, allowed: Sequence[str]) -> frozenset[str] | None:
    """The names that a gateway without keys answers to, besides those of this machine.

    None, which is any, where it listens for other machines and none is ``allowed`` by name: those
    know it by names that are not known here.
    """
    if not allowed and not is_loopback(listens_at):
        return None
    return frozenset(name.lower().strip("[]") for name in (listens_at, *allowed))


def proxies_of(named: Sequence[str]) -> tuple[IPv4Network | IPv6Network, ...]:
    """The networks that texts name; raises UserError."""
    try:
        return tuple(ip_network(each) for each in named)
    except ValueError as error:
        raise UserError(
            f"--proxy: {error}; give an address, or a network like 10.0.0.0/8"
        ) from None


def is_loopback(name: str) -> bool:
    """Whether a name or an address is this machine's own."""
    address = address_of(name)
    return name == "localhost" or (address is not None and address.is_loopback)


def address_of(name: str) -> IPv4Address | IPv6Address | None:
    """The address that a text is; None: it is none."""
    try:
        return ip_address(name)
    except ValueError:
        return None


def answers_to(host: str, known: frozenset[str] | None) -> bool:
    """Whether a gateway of the names ``known`` (:func:`hosts_of`) goes by the name in a ``Host``
    header.

    A page may bind its own name to this machine's address and ask by that, without an origin.
    """
    try:
        name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return False
    return known is None or name in known or is_loopback(name)


def is_own(origin: str, host: str, known: frozenset[str] | None) -> bool:
    """Whether a page of ``origin`` came from the gateway itself, asked by ``host``.

    The same name is not enough: any page may have bound its own to this machine. It cannot do that
    to an address, to ``localhost``, nor to a name of ``known``, which the owner allowed.
    """
    try:
        at = urlsplit(origin)
        name = at.hostname or ""
    except ValueError:
        return False
    return (
        at.scheme in {"http", "https"}
        and at.netloc.lower() == host.lower()
        and (name in (known or ()) or name == "localhost" or address_of(name) is not None)
    )
