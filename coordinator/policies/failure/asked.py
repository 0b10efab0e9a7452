"""Remembers what single pings said of peers that nobody watches all the time. Pure."""

from collections.abc import Container
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedConfig:
    """How long answers count, and when a peer is silent; times in seconds."""

    silent_misses: int
    """Pings in a row without an answer after which a peer is silent."""
    answered_s: float = 5.0
    """Time for which an answer counts: long enough for some looks at 80 stages."""
    silent_s: float = 30.0
    """Pause after which a silent peer is asked again before others, and time for which fewer
    misses count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Last:
    misses: int
    at_s: float


class Asked:
    """Which peers have answered lately, and which are silent, by a clock in seconds.

    One lost answer says little: a machine may be busy for a moment. So a peer is silent after as
    many misses in a row as a watched one, and stays so until it answers.
    """

    def __init__(self, config: AskedConfig) -> None:
        self._config = config
        self._last: dict[str, _Last] = {}

    def note(self, peer_id: str, *, answered: bool, now_s: float) -> None:
        """A ping has ended."""
        misses = 0 if answered else self._misses(peer_id) + 1
        self._last[peer_id] = _Last(misses=misses, at_s=now_s)

    def forget(self, known: Container[str], now_s: float) -> None:
        """Forget peers that are not ``known``, and what is too old to count."""
        config = self._config

        def counts(peer_id: str, last: _Last) -> bool:
            kept_s = config.silent_s if last.misses else config.answered_s
            return peer_id in known and (self.silent(peer_id) or now_s - last.at_s < kept_s)

        self._last = {p: last for p, last in self._last.items() if counts(p, last)}

    def answered(self, peer_id: str) -> bool:
        return peer_id in self._last and not self._misses(peer_id)

    def silent(self, peer_id: str) -> bool:
        """Whether the peer's last pings were in vain."""
        return self._misses(peer_id) >= self._config.silent_misses

    def waits(self, peer_id: str, now_s: float) -> bool:
        """Whether the peer is silent and was asked only just now: others are asked first."""
        last = self._last.get(peer_id)
        return last is not None and (
            self.silent(peer_id) and now_s - last.at_s < self._config.silent_s
        )

    def _misses(self, peer_id: str) -> int:
        last = self._last.get(peer_id)
        return 0 if last is None else last.misses
