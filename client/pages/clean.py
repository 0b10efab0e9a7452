"""Words that other peers chose, made fit for a public page: short, printable, no addresses."""

import re
from collections.abc import Mapping

from dht.messages.types import NodeRecord

NAME_CHARS_MAX = 32
_IPV4 = re.compile(r"\d{1,3}(?:\.\d{1,3}){3}")
_IPV6 = re.compile(r"[0-9A-Fa-f]{0,4}(?::[0-9A-Fa-f]{0,4}){3,}|[0-9A-Fa-f]{0,4}::[0-9A-Fa-f:]*")
_LINK = re.compile(r"(?:[A-Za-z][A-Za-z0-9+.-]*:)?//|www\.", re.IGNORECASE)
_ID = re.compile(r"[^0-9A-Za-z]")


def clean_name(text: str) -> str:
    """At most 32 printable ASCII characters, without IP addresses and what makes a link.

    Other scripts are left out too: marks that turn text around or pile up are among them.
    """
    text = "".join(char for char in text[:512] if " " <= char <= "~")
    for pattern in (_LINK, _IPV6, _IPV4):
        text = pattern.sub("*", text)
    return " ".join(text.split())[:NAME_CHARS_MAX] or "unnamed"


def peer_name(name: str, peer_id: str) -> str:
    """What a peer calls itself, made fit; the end of its id where it has no name."""
    return clean_name(name) if name.strip() else f"peer {clean_id(peer_id)[-8:]}"


def name_in(nodes: Mapping[str, NodeRecord], peer_id: str) -> str:
    """What a peer calls itself in ``nodes``, made fit; the end of its id where it does not."""
    record = nodes.get(peer_id)
    return peer_name("" if record is None else record.name, peer_id)


def clean_id(text: str) -> str:
    """A peer id's letters and digits, at most 64; a plan may name whatever its author likes."""
    return _ID.sub("", text)[:64] or "unknown"
