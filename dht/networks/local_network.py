"""What peers offer each other on one local network (``--local``), and which offer is meant. Pure.

An offer is a service of DNS-SD (RFC 6763): its instance is the peer's id, its TXT record has the
peer's name and, in parts, an invitation to that peer alone at private addresses. Anybody on the
network can make up offers, so all that they hold is checked here as an invitation is, and bounded.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, zip_longest

from dht.errors import UserError
from dht.identity.dialling import Scope, scope_of_host
from dht.identity.multiaddr import host_of, split
from dht.identity.peer_id import is_peer_id, short_name
from dht.networks.invitation import (
    FINGERPRINT_BYTES,
    INVITATION_BOUNDS,
    Invitation,
    invitation_to,
    read_invitation,
    text_of,
)

SERVICE = "_anabranch._tcp.local."


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalConfig:
    """Bounds of what is offered on a local network, and of what is read there."""

    heard_max: int = 64
    """Instances that one look asks about."""
    offers_max: int = 16
    """Offers that one look shows, and chooses among."""
    name_max: int = 60
    """Characters of a peer's name; with any of them a string of a TXT record has room for it."""
    part_max: int = 240
    txt_bytes_max: int = 2048
    digits_shown: int = 16


LOCAL_NETWORK = LocalConfig()

PARTS_MAX = -(-INVITATION_BOUNDS.text_max // LOCAL_NETWORK.part_max)


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What one peer offers on a local network."""

    name: str
    """What its owner calls it: 1 to ``LOCAL_NETWORK.name_max`` printable characters."""
    invitation: Invitation
    """Invitation to this peer alone, at private addresses."""

    @property
    def peer_id(self) -> str:
        return split(self.invitation.addresses[0])[0]

    def __str__(self) -> str:
        said = self.invitation
        digits = said.fingerprint[: LOCAL_NETWORK.digits_shown]
        model = said.model or "a model without a name"
        weights = f" (fingerprint {digits}…)" if digits else ""
        where = ", ".join(_host_and_port(address) for address in said.addresses)
        return f"{self.name}: {model}{weights}, network {said.network}, {where}"


def offer_of_peer(
    name: str, network: str, addresses: Sequence[str], model: str, fingerprint: str
) -> Offer:
    """The offer of a peer with these full addresses, of which the private ones are told.

    Raises UserError where none is private, or the network's name is none.
    """
    invitation = invitation_to(network, [a for a in addresses if _is_local(a)], model, fingerprint)
    offer = Offer(name=name, invitation=invitation)
    printable = "".join(each for each in name if each.isprintable()).strip()[
        : LOCAL_NETWORK.name_max
    ]
    return replace(offer, name=printable or short_name(offer.peer_id))


def txt_of(offer: Offer) -> dict[str, str]:
    """The offer as the properties of a TXT record."""
    text = text_of(offer.invitation)
    parts = {
        f"i{n // LOCAL_NETWORK.part_max}": text[n : n + LOCAL_NETWORK.part_max]
        for n in range(0, len(text), LOCAL_NETWORK.part_max)
    }
    return {"name": offer.name, **parts}


def read_offer(instance: str, txt_bytes: int, properties: Mapping[bytes, bytes | None]) -> Offer:
    """The offer in the properties of a TXT record of ``txt_bytes``; ``instance`` is its whole name.

    Raises ValueError for anything that is no offer.
    """
    if txt_bytes > LOCAL_NETWORK.txt_bytes_max:
        raise ValueError(f"its TXT record has more than {LOCAL_NETWORK.txt_bytes_max} bytes")
    name = (properties.get(b"name") or b"").decode("utf-8")
    if (
        not 0 < len(name) <= LOCAL_NETWORK.name_max
        or not name.isprintable()
        or name != name.strip()
    ):
        raise ValueError(f"a name takes 1 to {LOCAL_NETWORK.name_max} printable characters")
    parts = [properties.get(b"i%d" % n) or b"" for n in range(PARTS_MAX)]
    try:
        invitation = read_invitation(b"".join(parts).decode("ascii"))
    except UserError as error:
        raise ValueError(str(error)) from None
    peer_ids = {split(address)[0] for address in invitation.addresses}
    if peer_ids != {peer_id_in(instance)}:
        raise ValueError("it invites to another peer than its own")
    if not all(_is_local(address) for address in invitation.addresses):
        raise ValueError("an address in it is not private")
    return Offer(name=name, invitation=invitation)


def peer_id_in(instance: str) -> str | None:
    """The peer id in an instance's whole name; None for any other name."""
    peer_id = instance.removesuffix(f".{SERVICE}")
    return peer_id if peer_id != instance and is_peer_id(peer_id) else None


class Instances:
    """The instances that were heard of, ``LOCAL_NETWORK.heard_max`` at most; the first ones
    stay."""

    def __init__(self) -> None:
        self._names: dict[str, None] = {}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._names)

    def add(self, name: str) -> None:
        """Note an instance's whole name, unless it is none or there is no room."""
        if len(self._names) < LOCAL_NETWORK.heard_max and peer_id_in(name) is not None:
            self._names[name] = None

    def remove(self, name: str) -> None:
        """Forget an instance that said that it leaves."""
        self._names.pop(name, None)


def chosen(
    offers: Sequence[Offer],
    *,
    network: str | None = None,
    model: str | None = None,
    fingerprint: str = "",
    any_model: bool = False,
) -> Invitation | None:
    """The invitation that these offers come to, with addresses of up to
    ``INVITATION_BOUNDS.addresses_max`` peers.

    ``network``, ``model`` (a name) and ``fingerprint`` are what the user typed. An offer of another
    model in the network still lets the user in; so do several with ``any_model``. Returns None
    where no offer is of the network. Raises UserError where it is not clear which offer is meant,
    and where all have other weights than the user's fingerprint.
    """
    here = [each.invitation for each in offers if network in (None, each.invitation.network)]
    if not here:
        return None
    digits = fingerprint.strip().lower()
    named = [each for each in here if model in (None, each.model)]
    same = [each for each in named if _agree(each.fingerprint, digits)]
    if named and not same:
        raise UserError(
            f"what is offered on this network has other weights than fingerprint {digits[:64]!r}"
        )
    if not same or (any_model and len({(each.model, each.fingerprint) for each in same}) > 1):
        same = [replace(each, model="", fingerprint="") for each in here]
    kinds = {(each.network, each.model, each.fingerprint): each for each in same}
    if len(kinds) > 1:
        raise UserError(
            f"there are several offers on this network: {_listed(kinds.values())}; say which with"
            " --network, --model or --fingerprint, or give an invitation"
        )
    turns = zip_longest(*(each.addresses for each in same))
    addresses = dict.fromkeys(address for address in chain(*turns) if address is not None)
    return replace(same[0], addresses=tuple(addresses)[: INVITATION_BOUNDS.addresses_max])


def _agree(offered: str, digits: str) -> bool:
    return offered.startswith(digits[: 2 * FINGERPRINT_BYTES])


def _listed(invitations: Iterable[Invitation]) -> str:
    return "; ".join(
        f"network {each.network}"
        + (
            f" with {each.model} ({each.fingerprint[: LOCAL_NETWORK.digits_shown]})"
            if each.model
            else ""
        )
        for each in invitations
    )


def _is_local(address: str) -> bool:
    return scope_of_host(host_of(address)) is Scope.LOCAL


def _host_and_port(address: str) -> str:
    _, kind, host, _, port, *_ = address.split("/")
    return f"[{host}]:{port}" if kind == "ip6" else f"{host}:{port}"
