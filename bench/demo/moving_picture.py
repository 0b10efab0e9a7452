"""Screens of text over time, as one SVG that moves without a script. Pure.

Each line of text is written once, and CSS shows it for the times at which it stood there. Who asked
for less motion, or looks with a program that moves nothing, sees the last screen.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from testing.terminal import Cell

COLUMN_PX, LINE_PX, MARGIN_PX = 8.4, 19.0, 16.0
"""Of a monospaced font of 14 px: each run of text is set to exactly this width a character."""
STYLES = {
    "": "fill:#d4d7dd",
    "2": "fill:#7f8794",
    "1": "fill:#f2f4f7;font-weight:600",
    "1;36": "fill:#56c7d6;font-weight:600",
    "31": "fill:#f2777a",
    "32": "fill:#7fc98f",
    "33": "fill:#e5c07b",
}
"""The styles that are shown, by the numbers of SGR; others are shown as usual text."""
Line = tuple[Cell, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Screen:
    """What is shown from one time on."""

    at_s: float
    lines: Sequence[Line]


def styled(text: str, style: str = "") -> Line:
    """A line, or a part of one, in one style."""
    return tuple((character, style) for character in text)


def windows(screens: Sequence[Screen], end_s: float) -> dict[tuple[int, Line], list[list[float]]]:
    """For each line of text and row of the screen, from when to when it stands there, in seconds.

    ``screens`` are in order of time; the last one stays until ``end_s``.
    """
    found: dict[tuple[int, Line], list[list[float]]] = {}
    ends = [*(screen.at_s for screen in screens[1:]), end_s]
    for screen, until_s in zip(screens, ends, strict=True):
        if until_s <= screen.at_s:
            continue
        for row, line in enumerate(screen.lines):
            if not "".join(text for text, _ in line).strip():
                continue
            spans = found.setdefault((row, line), [])
            if spans and spans[-1][1] == screen.at_s:
                spans[-1][1] = until_s
            else:
                spans.append([screen.at_s, until_s])
    return found


def svg(
    screens: Sequence[Screen], *, columns: int, rows: int, hold_s: float, title: str, about: str
) -> str:
    """The picture: it runs to the last screen, shows that for ``hold_s``, and begins again.

    The first screen is at 0 s. ``title`` and ``about`` are for those who do not see it.
    """
    end_s = screens[-1].at_s + hold_s
    width_px, height_px = columns * COLUMN_PX + 2 * MARGIN_PX, rows * LINE_PX + 2 * MARGIN_PX
    names: dict[tuple[tuple[float, float], ...], str] = {}
    drawn = []
    for (row, line), spans in windows(screens, end_s).items():
        times = tuple((start_s, until_s) for start_s, until_s in spans)
        last = times[-1][1] == end_s
        if times == ((0.0, end_s),):
            name = ""
        else:
            name = f' class="t {names.setdefault(times, f"k{len(names)}")}"'
        hidden = "" if last else ' visibility="hidden"'
        drawn.append(f"<g{name}{hidden}>{_text(row, line)}</g>")
    moves = "".join(
        f"@keyframes {name}{{{_keyframes(times, end_s)}}}.{name}{{animation-name:{name}}}"
        for times, name in names.items()
    )
    styles = "".join(f".{_class(each)}{{{rules}}}" for each, rules in STYLES.items())
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width_px:g} {height_px:g}"'
        f' width="{width_px:g}" height="{height_px:g}" role="img" aria-labelledby="title about">\n'
        f'<title id="title">{escape(title)}</title><desc id="about">{escape(about)}</desc>\n'
        "<style>text{font:14px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',"
        f"monospace;white-space:pre}}{styles}"
        f".t{{animation:{end_s:.2f}s step-end infinite}}"
        "@media(prefers-reduced-motion:reduce){.t{animation:none!important}}"
        f"{moves}</style>\n"
        f'<rect width="{width_px:g}" height="{height_px:g}" rx="8" fill="#16191f"/>\n'
        + "\n".join(drawn)
        + "\n</svg>\n"
    )


def _class(style: str) -> str:
    return "s" + style.replace(";", "-")


def _keyframes(times: tuple[tuple[float, float], ...], end_s: float) -> str:
    points = {} if times[0][0] == 0 else {0.0: "hidden"}
    for start_s, until_s in times:
        points[start_s] = "visible"
        if until_s < end_s:
            points[until_s] = "hidden"
    return "".join(
        f"{at_s / end_s * 100:.2f}%{{visibility:{seen}}}" for at_s, seen in points.items()
    )


def _text(row: int, line: Line) -> str:
    """One text element for each run of a style; blanks at its ends are left out."""
    y_px, at, drawn = MARGIN_PX + (row + 0.75) * LINE_PX, 0, []
    while at < len(line):
        style = line[at][1]
        upto = next((n for n in range(at, len(line)) if line[n][1] != style), len(line))
        run = "".join(text for text, _ in line[at:upto])
        if words := run.strip():
            x_px = MARGIN_PX + (at + len(run) - len(run.lstrip())) * COLUMN_PX
            known = _class(style if style in STYLES else "")
            drawn.append(
                f'<text x="{x_px:g}" y="{y_px:g}" class="{known}"'
                f' textLength="{len(words) * COLUMN_PX:g}">{escape(words, quote=False)}</text>'
            )
        at = upto
    return "".join(drawn)
