"""Which lines tell somebody something new. Pure.

What stands for a while is looked at every second. A person hears of it once, and when it changes.
Two states that alternate are no news either: each is told again after ``AGAIN_S`` at the earliest.
"""

from dataclasses import dataclass, field

from dht.process.newest import Newest

AGAIN_S = 600.0
"""Time after which a line that was told may be told again: long enough for no log to fill up, short
enough for somebody who comes later to see what stands."""
TEXTS_MAX = 64
"""Number of told lines that are remembered, the newest."""


@dataclass(slots=True)
class News:
    """The lines about one thing that were told of late. Times in seconds, of the caller's clock."""

    _told_s: Newest[str, float] = field(default_factory=lambda: Newest(TEXTS_MAX))
    _now: str = ""

    def takes(self, text: str, now_s: float) -> bool:
        """Whether to tell ``text``, which is how things stand now; it then counts as told."""
        stands, self._now = text == self._now, text
        told_s = self._told_s.get(text)
        if stands or (told_s is not None and now_s < told_s + AGAIN_S):
            return False
        self._told_s[text] = now_s
        return True

    def takes_again(self, text: str, now_s: float) -> bool:
        """Whether to tell ``text`` of something that happened, and may happen often."""
        self._now = ""
        return self.takes(text, now_s)

    def forget(self) -> None:
        """What stood is over: the next line is news, whatever it says."""
        self._told_s.clear()
        self._now = ""
