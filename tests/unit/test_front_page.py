"""The README: short, and everything that it and the first guides point at exists."""

import re
from pathlib import Path

import pytest

from anabranch.commands import COMMANDS

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PAGES = (
    *("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"),
    *(f"docs/{page.name}" for page in sorted((ROOT / "docs").glob("*.md"))),
)
WORDS_MAX = 700


def test_the_front_page_is_short_and_warns_before_it_invites() -> None:
    assert len(README.split()) < WORDS_MAX
    warning = README.index("Peers can read the prompts")
    assert warning < README.index("anabranch ask") < README.index("anabranch join")
    for command in ("ask", "join", "serve"):
        assert len(re.findall(rf"^    anabranch {command}\b", README, re.MULTILINE)) == 1
    assert "CONTRIBUTING.md" in README


def anchors(page: Path) -> set[str]:
    """A page's named anchors, and those that GitHub makes of its headings."""
    text = page.read_text()
    headings = (
        re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", each)
        for each in re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    )
    made = {re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in headings}
    return made | set(re.findall(r'<a name="([^"]+)"', text))


@pytest.mark.parametrize("name", PAGES)
def test_what_a_page_points_at_exists(name: str) -> None:
    page = ROOT / name
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


@pytest.mark.parametrize("name", PAGES)
def test_the_commands_of_a_page_are_commands(name: str) -> None:
    text = (ROOT / name).read_text()
    shown = re.findall(r"^    anabranch ([a-z]+)", text, re.MULTILINE)
    shown += re.findall(r"`(?:python -m )?anabranch ([a-z]+)", text)
    assert set(shown) <= set(COMMANDS)


def test_each_cell_about_others_is_dated_and_no_row_is_short() -> None:
    table = README.partition("## Compared with others")[2].partition("## ")[0]
    assert re.search(r"as of \w+ 20\d\d", table)
    rows = [line for line in table.splitlines() if line.startswith("|")]
    assert {line.count("|") for line in rows} == {7}
    for name in ("NAT", "loss in mid-answer", "verification", "API", "models", "upkeep"):
        assert f"| {name} |" in table


def test_who_lends_installs_no_tests() -> None:
    makefile = (ROOT / "Makefile").read_text()
    recipe = makefile.partition("$(LENT)/.ready:")[2].partition("\n\n")[0]
    assert 'project["dependencies"]' in recipe
    assert "optional" not in recipe
    assert re.search(r"^join: \$\(LENT\)/\.ready", makefile, re.MULTILINE)
