"""Invitations: one word that stands for a network, a model, its weights and peers to join through.

``anabranch:`` and, in URL-safe base64 without padding: a byte for the version, a MessagePack list
of network, model, fingerprint (its first 16 bytes, or none) and peers with their addresses, and
four bytes of SHA-256 over all of that, so that a slip of the pen is no other network. Pure.

Anybody can make up an invitation. It says whom to dial and nothing about files here: its model is a
name or a hub id, never a path. Each invitation has one text.
"""

import base64
import hashlib
import ipaddress
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Annotated

import base58
import msgspec
from msgspec import Meta

from dht.checkpoints.hub import HubId
from dht.errors import UserError
from dht.identity.multiaddr import is_loopback, split

SCHEME = "anabranch:"
VERSION = 2
"""Fixed by the form of invitations: what it is written in today."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InvitationBounds:
    text_max: int = 1024
    """Characters of an invitation."""
    addresses_max: int = 4
    network_max: int = 64
    model_max: int = 128


INVITATION_BOUNDS = InvitationBounds()

FINGERPRINT_BYTES = 16
"""Fixed by the form of invitations: first bytes of a fingerprint that are carried. Nobody finds
other weights with the same ones."""
CHECK_BYTES = 4
"""Fixed by the form of invitations: length of the check sum."""
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*")
"""Model names that are no hub ids: no path, no flag, nothing that a terminal or shell acts upon."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Invitation:
    """What an invitation says; its text is :func:`text_of`."""

    network: str
    addresses: tuple[str, ...]
    """Full multiaddresses of peers with TCP, ``INVITATION_BOUNDS.addresses_max`` at most; the most
    trusted first."""
    model: str = ""
    """Name or hub id; empty: it names none."""
    fingerprint: str = ""
    """First 32 hex digits of the fingerprint of the model's weights; empty: not known."""


_Where = Annotated[bytes, Meta(min_length=6, max_length=300)]
"""A TCP address: the bytes of an IP address and of a port, or text such as ``/dns/host/tcp/1``."""


class _Peer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    peer: Annotated[bytes, Meta(min_length=1, max_length=48)]
    """The peer id's bytes."""
    where: Annotated[
        tuple[_Where, ...], Meta(min_length=1, max_length=INVITATION_BOUNDS.addresses_max)
    ]


class _Body(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    network: Annotated[str, Meta(min_length=1, max_length=INVITATION_BOUNDS.network_max)]
    model: Annotated[str, Meta(max_length=INVITATION_BOUNDS.model_max)]
    fingerprint: Annotated[bytes, Meta(max_length=FINGERPRINT_BYTES)]
    peers: Annotated[
        tuple[_Peer, ...], Meta(min_length=1, max_length=INVITATION_BOUNDS.addresses_max)
    ]


def is_invitation(text: str) -> bool:
    """Whether ``text`` is meant as an invitation, rightly or not."""
    return text[: len(SCHEME)].lower() == SCHEME


def invitation_to(
    network: str, addresses: Sequence[str], model: str = "", fingerprint: str = ""
) -> Invitation:
    """An invitation with the first of these addresses that it can carry.

    Addresses through relays are left out, loopback ones of peers that have others, and a model
    whose name is none (:func:`is_name`), with its fingerprint. Raises UserError where no address is
    left, or the network's name is none.
    """
    kept, elsewhere = [], set()
    for address in addresses:
        try:
            peer_id, where = split(address)
        except ValueError:
            continue
        kept.append((peer_id, where))
        if not is_loopback(where):
            elsewhere.add(peer_id)
    kept = [(peer_id, w) for peer_id, w in kept if not is_loopback(w) or peer_id not in elsewhere]
    named = is_name(model)
    made = Invitation(
        network=network,
        addresses=tuple(f"{w}/p2p/{peer_id}" for peer_id, w in dict.fromkeys(kept))[
            : INVITATION_BOUNDS.addresses_max
        ],
        model=model if named else "",
        fingerprint=fingerprint[: 2 * FINGERPRINT_BYTES] if named else "",
    )
    if (wrong := _wrong_with(made)) is not None:
        raise UserError(f"there is no invitation to this network: {wrong}")
    return made


def text_of(invitation: Invitation) -> str:
    """The invitation as one word."""
    body = _Body(
        network=invitation.network,
        model=invitation.model,
        fingerprint=bytes.fromhex(invitation.fingerprint),
        peers=tuple(
            _Peer(peer=base58.b58decode(peer_id), where=tuple(_packed(where) for _, where in each))
            for peer_id, each in groupby(map(split, invitation.addresses), key=itemgetter(0))
        ),
    )
    data = bytes([VERSION]) + msgspec.msgpack.encode(body)
    return SCHEME + base64.urlsafe_b64encode(data + _check(data)).rstrip(b"=").decode()


def read_invitation(text: str) -> Invitation:
    """The invitation that ``text`` is. Raises UserError for any other text."""
    try:
        return _read(text)
    except ValueError as error:
        raise UserError(
            f"{text[:40]!r}{'…' if len(text) > 40 else ''} is no invitation: {error}"
        ) from None


def is_name(model: str) -> bool:
    """Whether ``model`` can be a model's name in an invitation: a hub id, or one word."""
    if not 0 < len(model) <= INVITATION_BOUNDS.model_max or ".." in model:
        return False
    return _NAME.fullmatch(model) is not None or HubId.parse(model) is not None


def _read(text: str) -> Invitation:
    if len(text) > INVITATION_BOUNDS.text_max:
        raise ValueError(f"it is longer than {INVITATION_BOUNDS.text_max} characters")
    coded = text[len(SCHEME) :]
    try:
        data = base64.b64decode(coded + "=" * (-len(coded) % 4), altchars=b"-_", validate=True)
    except ValueError:
        raise ValueError("it has characters that none has, or lacks its end") from None
    content, check = data[:-CHECK_BYTES], data[-CHECK_BYTES:]
    if not content or check != _check(content):
        raise ValueError("a part of it is missing or mistyped; copy it whole")
    if content[0] != VERSION:
        raise ValueError(f"it is of version {content[0]}, this software knows {VERSION}; update it")
    try:
        body = msgspec.msgpack.decode(content[1:], type=_Body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        raise ValueError("its content has another form") from None
    invitation = Invitation(
        network=body.network,
        addresses=tuple(
            f"{_unpacked(where)}/p2p/{base58.b58encode(each.peer).decode()}"
            for each in body.peers
            for where in each.where
        ),
        model=body.model,
        fingerprint=body.fingerprint.hex(),
    )
    if (wrong := _wrong_with(invitation)) is not None:
        raise ValueError(wrong)
    if text_of(invitation) != text:
        raise ValueError("it is written in another way than invitations are")
    return invitation


def is_network(name: str) -> bool:
    """Whether a network may have this name."""
    return 0 < len(name) <= INVITATION_BOUNDS.network_max and "/" not in name and name.isprintable()


def _wrong_with(invitation: Invitation) -> str | None:
    """Why there cannot be such an invitation; None where there can."""
    if not is_network(invitation.network):
        most = INVITATION_BOUNDS.network_max
        return f"the network's name takes 1 to {most} printable characters, no /"
    if invitation.model and not is_name(invitation.model):
        return "its model is neither a name nor a hub id"
    digits = invitation.fingerprint
    if digits and not re.fullmatch(f"[0-9a-f]{{{2 * FINGERPRINT_BYTES}}}", digits):
        return f"a fingerprint has {2 * FINGERPRINT_BYTES} hex digits or more"
    if not 0 < len(invitation.addresses) <= INVITATION_BOUNDS.addresses_max:
        return "it has no address that can be dialled directly"
    for address in invitation.addresses:
        try:
            _, where = split(address)
        except ValueError as error:
            return f"an address in it is none: {error}"
        if not re.fullmatch(r"[A-Za-z0-9/.:_-]+", where):
            return "an address in it has characters that none has"
    return None


def _packed(where: str) -> bytes:
    """A TCP address as it is carried."""
    _, kind, host, _, port = where.split("/")
    if kind.startswith("ip"):
        with suppress(ValueError):
            packed = ipaddress.ip_address(host).packed + int(port).to_bytes(2, "big")
            if _unpacked(packed) == where:
                return packed
    return where.encode()


def _unpacked(where: bytes) -> str:
    """The text of an address; raises ValueError for bytes that are none."""
    if len(where) not in {6, 18} or (len(where) == 18 and where.startswith(b"/")):
        return where.decode("ascii")
    ip = ipaddress.ip_address(where[:-2])
    return f"/ip{ip.version}/{ip}/tcp/{int.from_bytes(where[-2:], 'big')}"


def _check(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()[:CHECK_BYTES]
