"""What pings say of a peer. Pure."""

from dataclasses import dataclass

SILENT_MISSES = 2
"""Pings in a row without an answer after which a peer does not answer: one may be lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PingState:
    """What a peer's last pings said. Time in Unix seconds."""

    answered_unix_s: float | None = None
    rtt_s: float | None = None
    misses: int = 0
    """Pings in a row without an answer."""

    @property
    def silent(self) -> bool:
        return self.misses >= SILENT_MISSES
