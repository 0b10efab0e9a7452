"""Links to this peer, as it measured them."""

from dht.messages.types import Link


class MeasuredLinks:
    """The newest probe of each link by its source; the peer's link keeper writes them."""

    def __init__(self) -> None:
        self.links: dict[str, Link] = {}

    def bandwidth_from(self, peer_id: str) -> float | None:
        """Bandwidth of the link from ``peer_id``, in bytes/s; None if it was not probed."""
        link = self.links.get(peer_id)
        return None if link is None else link.bandwidth_bytes_per_s
