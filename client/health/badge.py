"""A badge for READMEs: the swarm's state and speed as a small SVG. Pure.

Nothing that a peer chose is in it, and it never says more than the page: what was not measured
lately is unknown.
"""

from dataclasses import dataclass

from dht.process.json_file import Json


@dataclass(frozen=True, slots=True, kw_only=True)
class BadgeSizes:
    """Lengths in pixels."""

    height: int = 20
    font: int = 11
    pad: int = 7
    char_width: float = 6.4
    """Width of a usual character at this size; ``textLength`` makes the text exactly as wide."""


SIZES = BadgeSizes()
COLOURS = {
    "healthy": "#17704a",
    "healthy, but fragile": "#8f5206",
    "not healthy": "#ab2f29",
    "unknown": "#52636d",
}
"""Behind white text, with a contrast of more than 4.5."""


def badge_words(state: Json) -> tuple[str, str]:
    """The state, and all that the badge says: ``healthy``, ``healthy · 22 tokens/s``."""
    verdict = state["swarm"]["verdict"]
    if verdict not in COLOURS:
        return "unknown", "unknown"
    parts = [verdict]
    if state["swarm"]["healthy"]:
        if tpot_s := state["probes"]["tpot_p50_s"]:
            parts.append(f"{1 / tpot_s:.0f} tokens/s")
        serving = state["swarm"]["serving"]
        parts.append(f"{serving} {'peer' if serving == 1 else 'peers'}")
    return verdict, " · ".join(parts)


def badge_svg(state: Json) -> str:
    """The badge; its styles are attributes, since pages that show it allow no others."""
    verdict, words = badge_words(state)
    label = "anabranch"
    left, right = (len(text) * SIZES.char_width for text in (label, words))
    edge, width = left + 2 * SIZES.pad, left + right + 4 * SIZES.pad
    text = (
        f'<text x="{{x:.1f}}" y="14" textLength="{{length:.1f}}" fill="#fff"'
        f' font-family="Verdana,DejaVu Sans,sans-serif" font-size="{SIZES.font}">{{text}}</text>'
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}"'
        f' height="{SIZES.height}" role="img" aria-label="{label}: {words}">'
        f"<title>{label}: {words}</title>"
        f'<rect width="{width:.1f}" height="{SIZES.height}" rx="4" fill="{COLOURS[verdict]}"/>'
        f'<path d="M4 0h{edge - 4:.1f}v{SIZES.height}H4a4 4 0 0 1-4-4V4a4 4 0 0 1 4-4z"'
        ' fill="#14222a"/>'
        f"{text.format(x=SIZES.pad, length=left, text=label)}"
        f"{text.format(x=edge + SIZES.pad, length=right, text=words)}</svg>\n"
    )
