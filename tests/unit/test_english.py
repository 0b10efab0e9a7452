"""Documents that newcomers read: short sentences, and no words of our own for standard terms."""

import re
from pathlib import Path

import pytest

from anabranch.commands import help_text
from node.peer.join_options import join_parser
from testing.documents import prose, sentences

ROOT = Path(__file__).parents[2]
GUIDES = (
    *("README.md", "docs/start.md", "docs/ask.md", "docs/lend-a-gpu.md", "docs/private-swarm.md"),
    *("docs/public-page.md", "docs/how-it-works.md", "docs/what-works.md", "docs/agents.md"),
    *("docs/weights.md", "docs/index.md", "CONTRIBUTING.md", "SECURITY.md"),
)
WORDS_MAX = 30
PRIVATE = re.compile(r"\b(reckon\w*|mend\w*|laws?|rooms?|beside|rounds?)\b", re.IGNORECASE)
"""Words that a standard term says better."""


@pytest.mark.parametrize("name", GUIDES)
def test_a_guides_sentences_are_short_and_its_words_are_known(name: str) -> None:
    text = (ROOT / name).read_text()
    long = [s for s in sentences(text) if len(re.findall(r"\S*\w\S*", s)) > WORDS_MAX]
    assert not long
    plain = [re.sub("round trips?", "", paragraph) for paragraph in prose(text)]
    assert not [p for p in plain if PRIVATE.search(p)]


def test_the_counting_of_words_counts() -> None:
    long = " ".join(["word"] * (WORDS_MAX + 1))
    assert sentences(f"# Title\n\nOne two. Three:\n- `a b` c\n\n    code here\n\n{long}.") == [
        *("", "Title", "One two.", "Three:", "X c"),
        f"{long}.",
    ]


def test_the_words_of_help_are_known() -> None:
    for shown in (help_text(), join_parser().format_help_all()):
        assert not PRIVATE.search(shown.replace("round trip", ""))
