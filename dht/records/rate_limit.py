"""Limits rates of requests by token buckets, one per name, bounded in number. Pure."""

from dataclasses import dataclass, field

NAMES_MAX = 4096


@dataclass(slots=True, kw_only=True)
class Rates:
    """Token buckets that allow each name ``per_s`` on average and ``burst`` at once."""

    per_s: float
    burst: float
    names_max: int = NAMES_MAX
    _buckets: dict[str, tuple[float, float]] = field(default_factory=dict)

    def take(self, name: str, count: float, now_s: float) -> bool:
        """Take ``count`` tokens of ``name`` if there are enough; returns whether there were."""
        left, since_s = self._buckets.pop(name, (self.burst, now_s))
        left = min(self.burst, left + max(0.0, now_s - since_s) * self.per_s)
        fits = count <= left
        self._buckets[name] = (left - count if fits else left, now_s)
        if len(self._buckets) > self.names_max:  # forget the name unused for longest
            del self._buckets[next(iter(self._buckets))]
        return fits

    def charge(self, name: str, count: float, now_s: float) -> None:
        """Take ``count`` tokens even if fewer are left, for what has been spent already."""
        if not self.take(name, count, now_s):
            left, _ = self._buckets[name]
            self._buckets[name] = (left - count, now_s)
