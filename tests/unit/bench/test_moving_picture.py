"""The film of the README: what a terminal showed, line by line and time by time."""

import re
from xml.etree import ElementTree

from bench.demo.film import picture, screens
from bench.demo.moving_picture import Screen, styled, svg, windows
from testing.paths import ROOT
from testing.terminal import cells, shown

FILM = ROOT / "docs" / "images" / "film.svg"
BYTES_MAX = 300_000
SVG = "{http://www.w3.org/2000/svg}"


def test_a_terminal_keeps_the_colour_of_what_is_written_over_it() -> None:
    written = "\x1b[1;36m> \x1b[0mOne\r\n\x1b[2mon the way…\x1b[0m\r\x1b[KUpon"
    assert cells(written) == [
        [*styled("> ", "1;36"), *styled("One")],
        [*styled("Upon")],
    ]
    assert shown(written) == "> One\nUpon"


def test_a_line_is_drawn_once_for_all_times_at_which_it_stands_there() -> None:
    one, two = styled("one"), styled("two")
    taken = [
        Screen(at_s=0.0, lines=(one,)),
        Screen(at_s=1.0, lines=(one, two)),
        Screen(at_s=2.0, lines=(two, styled("  "))),
        Screen(at_s=3.0, lines=(one,)),
    ]
    assert windows(taken, 5.0) == {
        (0, one): [[0.0, 2.0], [3.0, 5.0]],
        (1, two): [[1.0, 2.0]],
        (0, two): [[2.0, 3.0]],
    }


def test_without_motion_the_last_screen_alone_is_seen() -> None:
    taken = [
        Screen(at_s=0.0, lines=(styled("a < b"),)),
        Screen(at_s=1.0, lines=(styled("done", "31"),)),
    ]
    drawn = svg(taken, columns=20, rows=2, hold_s=1.0, title="A & B", about="what")
    root = ElementTree.fromstring(drawn)  # noqa: S314 - ours
    groups = {group.findtext(f"{SVG}text"): group for group in root.iter(f"{SVG}g")}
    assert groups["a < b"].get("visibility") == "hidden"
    assert groups["done"].get("visibility") is None
    assert "0.00%{visibility:visible}50.00%{visibility:hidden}" in drawn
    assert "0.00%{visibility:hidden}50.00%{visibility:visible}" in drawn
    assert "prefers-reduced-motion" in drawn


def test_a_film_has_a_screen_for_each_change() -> None:
    watched = [(10.0, ("serves layers 0-7",)), (11.02, ("killed",))]
    history = [(9.0, "> "), (10.5, "> One"), (12.0, "> One morning")]
    film = screens(["v1"], watched, history, 10.0, 20.0)
    assert [round(each.at_s, 2) for each in film] == [0.0, 0.5, 1.0, 2.0]
    texts = ["\n".join("".join(t for t, _ in line) for line in each.lines) for each in film]
    assert "● v1  serves layers 0-7" in texts[0]
    assert "✝ v1  killed" in texts[2]
    assert [text.rpartition("> ")[2] for text in texts] == ["", "One", "One", "One morning"]


def test_a_screen_has_no_more_lines_than_fit() -> None:
    written = "\r\n".join(map(str, range(100)))
    lines = picture(["a", "b"], ["serves layers 0-3", "starts"], 7, written, 0.0)
    full = picture(["a", "b"], ["serves layers 0-3", "starts"], 7, written * 2, 0.0)
    assert len(lines) == len(full)
    assert "".join(text for text, _ in lines[-1]) == "99"


def test_the_film_of_the_readme_is_small_whole_and_of_a_rerouted_answer() -> None:
    text = FILM.read_text()
    assert FILM.stat().st_size < BYTES_MAX
    root = ElementTree.fromstring(text)  # noqa: S314 - ours
    said = " ".join("".join(each.itertext()) for each in root)
    assert "rerouting" in said
    assert "killed" in said
    assert re.search(r"\d+ tokens after a prompt of \d+", said)
    assert not re.search(r"<script|href|/(home|root|tmp|work)/", text)
    assert f"]({FILM.relative_to(ROOT)})" in (ROOT / "README.md").read_text()
