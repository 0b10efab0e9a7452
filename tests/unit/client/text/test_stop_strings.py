"""Stop strings cut an answer's text before the first of them."""

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from client.text.stop_strings import StopStrings


@given(
    text=st.text(alphabet="abc", max_size=30),
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=3),
    sizes=st.lists(st.integers(1, 4)),
)
@example(text="aabc", stops=["abc", "b"], sizes=[4])
def test_the_text_ends_before_the_first_stop(text: str, stops: list[str], sizes: list[int]) -> None:
    shown, rest, cutter = "", text, StopStrings(stops)
    while rest and not cutter.stopped:
        size = sizes.pop() if sizes else 1
        shown += cutter.push(rest[:size])
        rest = rest[size:]
    shown += cutter.flush()
    if cutter.stopped:  # whatever the sizes of the pieces
        end = min(text.find(stop) + len(stop) for stop in stops if stop in text)
        first = min(end - len(stop) for stop in stops if text[:end].endswith(stop))
        assert shown == text[:first]
        assert text[first:end] == cutter.found
    else:
        assert shown == text
        assert not any(stop in text for stop in stops)


class _ReadCharacters(str):
    """A stop string that counts how many of its characters are looked at."""

    __slots__ = ()
    count = 0

    def __getitem__(self, key: Any) -> str:
        found = super().__getitem__(key)
        _ReadCharacters.count += len(found)
        return found


@pytest.mark.parametrize("almost", ["a", "ab"])
def test_a_token_costs_the_same_however_long_stop_strings_and_answer_are(almost: str) -> None:
    stops = [_ReadCharacters(almost * 512 + str(n)) for n in range(16)]
    cutter = StopStrings(stops)
    shown = ""
    for _ in range(1000):
        _ReadCharacters.count = 0
        shown += cutter.push(almost * 2)
        # A step back is paid for by steps forward: each is at most one stop string long.
        assert _ReadCharacters.count <= 3 * 16 * len(almost * 2 + almost * 512)
    _ReadCharacters.count = 0
    shown += "".join(cutter.push(almost * 2) for _ in range(1000))
    assert _ReadCharacters.count <= 3 * 16 * 2000 * len(almost)
    assert shown + cutter.flush() == almost * 4000
