"""Names and addresses that requests come by. Pure."""

from collections.abc import Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_network
from urllib.parse import urlsplit

from dht.budget import ip_of, neighbourhood_of
from dht.errors import UserError

IpNetwork = IPv4Network | IPv6Network
ANY = "*"
USUAL_PORTS = {"http": ":80", "https": ":443"}
"""Fixed by RFC 6454: ports that browsers leave out of an origin."""


def hosts_of(listens_at: str, allowed: Sequence[str]) -> frozenset[str] | None:
    """The names that a gateway without keys answers to, besides those of this machine.

    None, which is any, where it listens for other machines and none is ``allowed`` by name: those
    know it by names that are not known here.
    """
    if not allowed and not is_loopback(listens_at):
        return None
    return frozenset(name.lower().strip("[]") for name in (listens_at, *allowed))


def origin_of(said: str) -> str:
    """An origin that an owner allows, as a browser sends it: in lower case, without a usual port.

    ``*`` is any; within an origin, once, it stands for a part of it. Raises UserError for what no
    browser would send: it would let nobody in, without a word.
    """
    given = said.rstrip("/").lower()
    try:
        at = urlsplit(given)
    except ValueError:
        at = urlsplit("")
    if given == ANY or (given == f"{at.scheme}://{at.netloc}" and given.count(ANY) <= 1):
        return given.removesuffix(USUAL_PORTS.get(at.scheme, ""))
    raise UserError(
        f"--allow-origin is {said[:200]!r}; give scheme, name and port as a browser shows them,"
        " such as https://chat.example.org or chrome-extension://*, or * for any"
    )


def is_allowed(origin: str, allowed: Sequence[str]) -> bool:
    """Whether a page of ``origin`` is one of those ``allowed`` (:func:`origin_of`)."""
    return any(each == ANY or _fits(origin.lower(), each) for each in allowed)


def _fits(origin: str, pattern: str) -> bool:
    begin, star, end = pattern.partition(ANY)
    between = origin[len(begin) : len(origin) - len(end)] if star else ""
    return origin == f"{begin}{between}{end}" and "/" not in between


def check_hosts(hosts: Sequence[str]) -> None:
    """Raises UserError for names that no browser would send: they would let nobody in, without a
    word."""
    for host in hosts:
        name = host.lower()
        if name not in (_name_of(name), f"[{_name_of(name)}]") and address_of(name) is None:
            raise UserError(
                f"--allow-host is {host[:200]!r}; give the name alone, such as chat.example.org"
            )


def proxies_of(named: Sequence[str]) -> tuple[IpNetwork, ...]:
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
    """The address that a text is, with a port or without; None: it is none."""
    return ip_of(name) or ip_of(_name_of(name))


def _name_of(host: str) -> str:
    """The name in a ``Host`` header, without its port; "" where there is none."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def asked_by(remote: str, forwarded: Sequence[str], proxies: Sequence[IpNetwork]) -> str:
    """The nearest address that is not one of the owner's ``proxies``.

    ``remote`` is connected to the gateway; ``forwarded`` is what each proxy added, the first one's
    first. Anybody may write what stands before the entry of a proxy that is not the owner's.
    """
    nearest = (remote, *reversed(forwarded))
    theirs = (said for said in nearest if not is_proxy(said, proxies))
    return next(theirs, nearest[-1])


def is_proxy(remote: str, proxies: Sequence[IpNetwork]) -> bool:
    """Whether an address is one of the owner's proxies."""
    address = address_of(remote)
    return address is not None and any(address in proxy for proxy in proxies)


def party_of(remote: str) -> str:
    """Whose turn a request from an address takes: who has one of IPv6 has 2**64 of them."""
    return neighbourhood_of(str(address_of(remote))) or remote


def answers_to(host: str, known: frozenset[str] | None) -> bool:
    """Whether a gateway of the names ``known`` (:func:`hosts_of`) goes by the name in a ``Host``
    header.

    A page may bind its own name to this machine's address and ask by that, without an origin.
    """
    name = _name_of(host).rstrip(".")
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
