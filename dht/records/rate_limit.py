"""How often others may ask: token buckets, one per name, bounded in number. Pure."""

from dataclasses import dataclass, field

NAMES_MAX = 4096


@dataclass(slots=True, kw_only=True)
class Rates:
    """``per_s`` in the long run and ``burst`` at once, for each name by itself."""

    per_s: float
    burst: float
    names_max: int = NAMES_MAX
    _buckets: dict[str, tuple[float, float]] = field(default_factory=dict)

    def take(self, name: str, count: float, now_s: float) -> bool:
        """Whether ``name`` may have ``count`` now; they are taken if so."""
        left, since_s = self._buckets.pop(name, (self.burst, now_s))
        left = min(self.burst, left + max(0.0, now_s - since_s) * self.per_s)
        fits = count <= left
        self._buckets[name] = (left - count if fits else left, now_s)
        if len(self._buckets) > self.names_max:  # forget who has been silent for longest
            del self._buckets[next(iter(self._buckets))]
        return fits

    def charge(self, name: str, count: float, now_s: float) -> None:
        """Take ``count`` though it is more than there is: what has been spent already."""
        if not self.take(name, count, now_s):
            left, _ = self._buckets[name]
            self._buckets[name] = (left - count, now_s)
