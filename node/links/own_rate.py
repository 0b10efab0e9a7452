"""Finds the rate of a machine's own uplink from links that were busy at the same time. Pure.

A link alone tells how fast its narrowest part is, which may be at the other end; the sum of all
links is a bound from below, since there may have been no more to send. But where several links were
the limit all the time and carried clearly less together than each of them does alone, they share
something, and the sum is its rate. Until that is seen, the rate is not known.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from dht.process.newest import Newest


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSeen:
    """Totals of one link since its stream began."""

    delivered_bytes: int
    busy_us: int
    """Time for which the link, not its sender, was the limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RateConfig:
    """When the uplink counts as measured, and for how long."""

    window_s: float = 5.0
    """Minimum length of a window."""
    busy: float = 0.8
    """Minimum share of a window for which a busy link was the limit of what its peer sent."""
    shared: float = 0.8
    """Maximum ratio of a sum to its links' rates alone where they share an uplink."""
    sums_kept: int = 8
    """Number of the newest shared windows, of which the largest sum counts."""
    links_kept: int = 64
    """Maximum links whose rate alone is remembered, the newest."""
    told_apart: float = 1.1
    """Ratio of a rate to the announced one from which on it is announced anew."""


OWN_RATE = RateConfig()


class OwnRate:
    """One machine's uplink, told of its links every so often."""

    def __init__(self) -> None:
        self._before: dict[str, LinkSeen] = {}
        self._before_s: float | None = None
        self._alone: Newest[str, float] = Newest(OWN_RATE.links_kept)
        self._sums: deque[float] = deque(maxlen=OWN_RATE.sums_kept)
        self._told: float | None = None

    def look(self, links: Mapping[str, LinkSeen], now_s: float) -> None:
        """Take the links' totals; a window ends where ``window_s`` passed since the last one."""
        if self._before_s is not None and now_s - self._before_s < OWN_RATE.window_s:
            return
        if self._before_s is not None:
            self._end_window(links, now_s - self._before_s)
        self._before, self._before_s = dict(links), now_s

    def _end_window(self, links: Mapping[str, LinkSeen], took_s: float) -> None:
        rates: dict[str, float] = {}
        busy: set[str] = set()
        for name, link in links.items():
            before = self._before.get(name)
            if before is None or link.delivered_bytes < before.delivered_bytes:
                continue  # a stream that began within the window
            rates[name] = (link.delivered_bytes - before.delivered_bytes) / took_s
            if link.busy_us - before.busy_us >= OWN_RATE.busy * took_s * 1e6:
                busy.add(name)
        total = sum(rates.values())
        if self._sums and total > OWN_RATE.told_apart * max(self._sums):
            self._sums.clear()  # it carried more than it can: what was seen holds no longer
        if len(busy) == 1:
            (name,) = busy
            self._alone[name] = max(rates[name], self._alone.get(name, 0.0))
        elif len(busy) > 1 and busy <= self._alone.keys():
            together = sum(rates[name] for name in busy)
            if together < OWN_RATE.shared * sum(self._alone[name] for name in busy):
                self._sums.append(total)

    @property
    def bytes_per_s(self) -> float | None:
        """The uplink's rate; None: not known. It changes only by ``told_apart`` or more.

        It is at least that of the fastest link alone, however slowly others read together.
        """
        found = max([*self._sums, *self._alone.values()]) if self._sums else None
        told = self._told
        if (
            found is None
            or told is None
            or max(found, told) > OWN_RATE.told_apart * min(found, told)
        ):
            self._told = found
        return self._told
