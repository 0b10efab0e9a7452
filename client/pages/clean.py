"""Words that other peers chose, made fit for a public page: short, printable, no addresses."""

import re
from collections import Counter
from collections.abc import Callable, Mapping
from functools import lru_cache

from dht.messages.types import NodeRecord

NAME_CHARS_MAX = 32
_IPV4 = re.compile(r"\d{1,3}(?:\.\d{1,3}){3}")
_IPV6 = re.compile(r"[0-9A-Fa-f]{0,4}(?::[0-9A-Fa-f]{0,4}){3,}|[0-9A-Fa-f]{0,4}::[0-9A-Fa-f:]*")
_LINK = re.compile(r"(?:(?<![a-z0-9+.-])[a-z][a-z0-9+.-]*+:)?//|www\.", re.IGNORECASE)
"""A scheme is looked for where a word begins alone: from each letter on, it would be in a square of
time, and there are thousands of names."""
_ID = re.compile(r"[^0-9A-Za-z]")


def without_links(text: str) -> str:
    """``text`` with ``*`` for what makes a link of what follows."""
    return _LINK.sub("*", text)


@lru_cache(maxsize=4096)
def clean_name(text: str) -> str:
    """At most 32 printable ASCII characters, without IP addresses and what makes a link.

    Other scripts are left out too: marks that turn text around or pile up are among them.
    """
    text = "".join(char for char in text[:512] if " " <= char <= "~")
    text = without_links(text)
    for pattern in (_IPV6, _IPV4):
        text = pattern.sub("*", text)
    return " ".join(text.split())[:NAME_CHARS_MAX] or "unnamed"


def peer_name(name: str, peer_id: str) -> str:
    """What a peer calls itself, made fit; the end of its id where it has no name."""
    return clean_name(name) if name.strip() else f"peer {clean_id(peer_id)[-8:]}"


def names_in(nodes: Mapping[str, NodeRecord]) -> dict[str, str]:
    """What peers call themselves, made fit; with the ends of their ids where several use a name,
    of which 10 characters are shown then."""
    named = {peer_id: peer_name(record.name, peer_id) for peer_id, record in nodes.items()}
    uses = Counter(named.values())
    return {
        peer_id: name if uses[name] == 1 else f"{name[:10]} {clean_id(peer_id)[-8:]}"
        for peer_id, name in named.items()
    }


def namer(nodes: Mapping[str, NodeRecord]) -> Callable[[str], str]:
    """What a peer is called among ``nodes``, by its id; the end of that where it is not there."""
    names = names_in(nodes)
    return lambda peer_id: names.get(peer_id) or peer_name("", peer_id)


def clean_id(text: str) -> str:
    """A peer id's letters and digits, at most 64; a plan may name whatever its author likes."""
    return _ID.sub("", text)[:64] or "unknown"
