"""Links to this peer, as it probed them."""

from dht.messages.types import Link


class MeasuredLinks:
    """The newest probe of each link, by its source; written by the peer's link keeper."""

    def __init__(self) -> None:
        self.links: dict[str, Link] = {}

    def bandwidth_from(self, peer_id: str) -> float | None:
        """Bandwidth of the link from ``peer_id``, in bytes/s; None where it was not probed."""
        link = self.links.get(peer_id)
        return None if link is None else link.bandwidth_bytes_per_s
