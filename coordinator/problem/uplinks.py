"""Which peers share an internet connection, and what it carries, from records. Pure."""

from collections.abc import Iterable, Mapping, Sequence

from dht.identity.uplink import is_true
from dht.messages.types import Link, NodeRecord, SharedUplink


def homes_of(usable: Mapping[str, NodeRecord]) -> dict[str, str]:
    """The shared connection of each peer that is behind one with another of ``usable``.

    A claim counts where the connection's key signed it. Those of lone peers are not looked at, as
    they say nothing: a connection of one peer is that peer's own.
    """
    claimed: dict[str, list[str]] = {}
    for peer_id, record in usable.items():
        if record.uplink is not None:
            claimed.setdefault(record.uplink.uplink, []).append(peer_id)
    found: dict[str, str] = {}
    for name, peers in claimed.items():
        if len(peers) > 1:
            true = [p for p in peers if (c := usable[p].uplink) is not None and is_true(c, p)]
            found |= dict.fromkeys(true, name) if len(true) > 1 else {}
    return found


def rates_of(
    homes: Mapping[str, str], usable: Mapping[str, NodeRecord], links: Sequence[Link]
) -> tuple[SharedUplink, ...]:
    """The connections of ``homes``, with what each carries to elsewhere.

    That is the most that a peer behind it measured: one that measured while others sent saw less.
    Where nobody measured it, it counts as fast as the fastest measured link over it, unless its
    owner lends a part of it to each of its peers.
    """
    members: dict[str, list[str]] = {}
    for peer_id, name in sorted(homes.items()):
        members.setdefault(name, []).append(peer_id)
    found = []
    for name, peers in sorted(members.items()):
        measured = _most(usable[peer].shared_up_bytes_per_s for peer in peers)
        lent = [usable[peer].up_bytes_per_s for peer in peers]
        if measured is None and None in lent:
            measured = _most(
                link.bandwidth_bytes_per_s
                for link in links
                if homes.get(link.source) == name != homes.get(link.target)
            )
        found.append(SharedUplink(name=name, up_bytes_per_s=measured))
    return tuple(found)


def _most(rates: Iterable[float | None]) -> float | None:
    return max((rate for rate in rates if rate is not None), default=None)
