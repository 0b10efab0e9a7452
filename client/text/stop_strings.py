"""Stop strings: where an answer's text ends, found as its pieces come. Pure."""

from collections.abc import Sequence


class StopStrings:
    """Cuts the answer before the stop string that ends first, holding back what may become one.

    Each stop string is matched character by character (Knuth, Morris and Pratt), so that a piece
    costs the same whatever came before it and however long the stop strings are.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [(stop, _borders(stop)) for stop in stops if stop]
        self._matched = [0] * len(self._stops)
        """Number of characters of each stop string that the text so far ends with."""
        self._held = ""
        self.found: str | None = None
        """The stop string that ended the answer."""

    @property
    def stopped(self) -> bool:
        """Whether a stop string ended the answer."""
        return self.found is not None

    def push(self, text: str) -> str:
        """The part of the text that may be shown now."""
        self._held += text
        found = [
            (end, end - len(stop), stop)
            for at, (stop, borders) in enumerate(self._stops)
            if (end := self._match(at, stop, borders, text))
        ]
        keep = max(self._matched, default=0)
        if found:
            _, begins, self.found = min(found)
            keep = len(text) - begins
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], "" if found else self._held[cut:]
        return shown

    def _match(self, at: int, stop: str, borders: Sequence[int], text: str) -> int:
        """The end of the first match of the stop string number ``at`` in ``text``; 0: none."""
        size = self._matched[at]
        for end, char in enumerate(text, 1):
            while size and stop[size] != char:
                size = borders[size - 1]
            size += stop[size] == char
            if size == len(stop):
                return end
        self._matched[at] = size
        return 0

    def flush(self) -> str:
        """The text that was held back, when the answer ended without a stop string."""
        shown, self._held = self._held, ""
        return shown


def _borders(text: str) -> tuple[int, ...]:
    """For each beginning of ``text``, the size of its longest proper border: a part that both
    begins and ends it."""
    sizes = [0]
    for char in text[1:]:
        size = sizes[-1]
        while size and text[size] != char:
            size = sizes[size - 1]
        sizes.append(size + (text[size] == char))
    return tuple(sizes)
