"""An answer on a terminal: what stays of it is the answer, whatever was shown meanwhile."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from client.terminal import answer_view as module
from client.terminal.answer_view import answer_view
from tests.unit.client.terminal.screen import Screen

ANSWER = """\
# The otter

She found a **small** blue boat:

1. one oar, and a rope that was far too long for any boat of that size

2. no sail

```python
def float():

    return "boat"
```

And went `home`.
"""


@pytest.fixture(autouse=True)
def _drawn_at_every_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REDRAW_S", 0.0)


def console(screen: Screen, width: int = 40, height: int = 8) -> Console:
    file: Any = screen
    return Console(file=file, force_terminal=True, width=width, height=height, highlight=False)


def shown(pieces: list[str], *, markdown: bool, notes: tuple[str, ...] = ()) -> list[str]:
    screen = Screen()
    with answer_view(console(screen), markdown=markdown) as view:
        for number, piece in enumerate(pieces):
            if notes:
                view.note(notes[number % len(notes)])
            view.write(piece)
    return screen.shown()


def test_markdown_looks_the_same_in_whatever_pieces_it_comes() -> None:
    whole = shown([ANSWER], markdown=True)
    assert "small" in " ".join(whole)
    assert not any("**" in line or "```" in line for line in whole)
    assert any('return "boat"' in line for line in whole)
    assert shown(list(ANSWER), markdown=True, notes=("volunteer-3 left; rerouting…", "")) == whole


def test_plain_text_stays_as_it_is() -> None:
    text = "One morning\n\n**Yara** found\na bottle.\n"
    assert shown(list(text), markdown=False) == ["One morning", "", "**Yara** found", "a bottle."]


def test_a_note_is_seen_below_the_answer_and_leaves_no_trace() -> None:
    screen = Screen()
    with answer_view(console(screen), markdown=False) as view:
        view.write("One morn")
        view.note("volunteer-3 left; rerouting…")
        assert screen.shown() == ["One morn", "volunteer-3 left; rerouting…"]
        view.write("ing")
        assert screen.shown() == ["One morning"]
    assert screen.shown() == ["One morning"]


def test_a_long_paragraph_scrolls_and_nothing_of_it_is_shown_twice() -> None:
    words = [f"word{number} " for number in range(200)]
    lines = shown(words, markdown=False, notes=("asking…",))
    assert " ".join(lines).split() == [word.strip() for word in words]
    assert len(lines) > 30


@given(st.lists(st.text("ab *`#-1.\n", max_size=6), max_size=30))
def test_no_cut_tears_a_plain_answer(pieces: list[str]) -> None:
    whole = "".join(pieces)
    letters = "".join(shown(pieces, markdown=False, notes=("x left…",)))
    assert letters.replace(" ", "") == whole.replace(" ", "").replace("\n", "")
