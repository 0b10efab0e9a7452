"""Tells this peer's owner, once for each version, that others speak another version of the wire.

Their records do not decode, so nobody counts or plans on them; without a word, both sides would
only see streams that close.
"""

import logging

from dht.identity.peer_id import short_name
from dht.messages.codec import WIRE_VERSION

_log = logging.getLogger(__name__)


class OtherVersions:
    """Which other versions were met; the number may be a stranger's invention."""

    told_max = 4
    """Versions that the owner is told of: strangers may name any number of them."""

    def __init__(self) -> None:
        self._told: set[int] = set()

    def note(self, peer_id: str, version: int) -> None:
        if version in self._told or len(self._told) >= self.told_max:
            return
        self._told.add(version)
        _log.warning(
            "peer %s speaks wire version %d, this software %d: they cannot work together, and none"
            " of that version counts here; the older one must be updated",
            short_name(peer_id) if peer_id else "?",
            version,
            WIRE_VERSION,
        )
