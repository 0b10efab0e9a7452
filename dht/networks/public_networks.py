"""The list of public networks: entries that each network's founder has signed. Pure.

``networks.toml`` ships with this software and is added to by pull requests. Once it is fetched from
anywhere it is a stranger's: it is bounded, typed, and every entry is checked against the founder's
peer id, which its own invitation names. A signature says who wrote an entry, not that the network
is good.
"""

import base64
import re
import tomllib
from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from dht.errors import UserError
from dht.identity.peer_id import Identity, is_peer_id, verify
from dht.networks.invitation import INVITATION_BOUNDS, Invitation, read_invitation

FILE_BYTES_MAX = 256 * (INVITATION_BOUNDS.text_max + 1024)
"""Room for as many entries as a list may have, each with the longest invitation."""
SIGNED = b"anabranch public network, version 1\n"
"""What stands before the signed bytes, so that no other signature of a peer is one of these."""
_CONTACT = re.compile(r"https://[A-Za-z0-9._~:/?#@!$&'()*+,;=%-]+|[^\s@]+@[^\s@]+")


class Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One public network."""

    name: Annotated[str, Meta(min_length=1, max_length=64)]
    model: Annotated[str, Meta(min_length=1, max_length=128)]
    invitation: Annotated[str, Meta(min_length=1, max_length=INVITATION_BOUNDS.text_max)]
    contact: Annotated[str, Meta(min_length=1, max_length=128)]
    """Where people reach who runs it: an address of mail, or one that begins with https://."""
    about: Annotated[str, Meta(max_length=160)] = ""
    founder: Annotated[str, Meta(max_length=64)]
    """Peer id whose key signed the entry; its address is in the invitation."""
    signature: Annotated[str, Meta(max_length=88)]
    """Ed25519 over :data:`SIGNED` and the other fields, in base64."""

    @property
    def said(self) -> Invitation:
        """What the invitation says; raises UserError."""
        return read_invitation(self.invitation)


class _List(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    network: Annotated[tuple[Entry, ...], Meta(max_length=256)] = ()


def signed_bytes(entry: Entry) -> bytes:
    """The bytes that the founder signs: a JSON list of the fields, in their order."""
    fields = [getattr(entry, name) for name in Entry.__struct_fields__ if name != "signature"]
    return SIGNED + msgspec.json.encode(fields)


def entry_of(invitation: str, founder: Identity, *, contact: str, about: str = "") -> Entry:
    """The entry of the network that ``invitation`` is to, signed. Raises UserError where it could
    not be listed."""
    said = read_invitation(invitation)
    made = Entry(
        name=said.network,
        model=said.model,
        invitation=invitation,
        contact=contact,
        about=about,
        founder=founder.peer_id,
        signature="",
    )
    signature = base64.b64encode(founder.sign(signed_bytes(made))).decode()
    made = msgspec.structs.replace(made, signature=signature)
    if wrong := wrong_with(made):
        raise UserError(f"this network cannot be listed: {wrong}")
    return made


def toml_of(entry: Entry) -> str:
    """The entry as it stands in ``networks.toml``."""
    # A string of JSON without control characters is a string of TOML.
    fields = msgspec.structs.asdict(entry).items()
    lines = [f"{name} = {msgspec.json.encode(value).decode()}" for name, value in fields]
    return "\n".join(["[[network]]", *lines, ""])


def wrong_with(entry: Entry) -> str:
    """Why an entry is not to be believed; empty where nothing is wrong with it."""
    try:
        said = entry.said
    except UserError as error:
        return str(error)
    if entry.name != said.network or entry.model != said.model:
        return "its invitation is to another network or model"
    if not said.fingerprint:
        return "its invitation names no fingerprint, so that it is to any weights of that name"
    if not is_peer_id(entry.founder):
        return "its founder is no peer id"
    if not any(address.endswith(f"/p2p/{entry.founder}") for address in said.addresses):
        return "its founder's address is not in its invitation"
    if _CONTACT.fullmatch(entry.contact) is None:
        return "its contact is neither an https:// address nor one of mail"
    if not all(text.isprintable() for text in (entry.contact, entry.about)):
        return "it has characters that cannot be shown"
    try:
        signature = base64.b64decode(entry.signature, validate=True)
    except ValueError:
        signature = b""
    if not verify(entry.founder, signed_bytes(entry), signature):
        return "its founder did not sign it"
    return ""


def read_list(data: bytes) -> tuple[Entry, ...]:
    """The entries of a list, of which none was checked by :func:`wrong_with`.

    Raises UserError for bytes that are no such list.
    """
    if len(data) > FILE_BYTES_MAX:
        raise UserError(f"a list of networks has at most {FILE_BYTES_MAX} bytes")
    try:
        read = msgspec.convert(tomllib.loads(data.decode()), _List)
    except (ValueError, RecursionError) as error:
        raise UserError(f"this is no list of networks: {error}") from None
    return read.network


def doubles(entries: Sequence[Entry]) -> set[str]:
    """Names that more than one entry has: people could not tell which is meant."""
    names = [entry.name for entry in entries]
    return {name for name in names if names.count(name) > 1}
