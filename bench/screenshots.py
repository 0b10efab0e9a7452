"""``python -m bench.screenshots``: pictures of the health page for docs/, of swarms on paper."""

import argparse
import sys
from pathlib import Path

from bench import paper_health
from bench.browser import PageServer, browser
from client.health.state import Json

SHOTS: tuple[tuple[str, str, int, str, bool], ...] = (
    ("healthy", "healthy", 1100, "light", True),
    ("dark", "healthy", 1100, "dark", False),
    ("layer-lost", "layer_lost", 1100, "light", False),
    ("ghost", "ghost", 1100, "light", True),
    ("500-peers", "many", 1100, "light", False),
    ("phone", "healthy", 390, "light", False),
)
"""Name, state of :mod:`bench.paper_health`, width, scheme, whether the whole page is taken."""


def take(directory: Path) -> list[Path]:
    """Write all pictures; returns their paths."""
    states: dict[str, Json] = {}
    paths = []
    with PageServer({}) as server, browser() as opened:
        for name, state, width, scheme, full in SHOTS:
            if state not in states:
                states[state] = getattr(paper_health, state)()
            server.state = states[state]
            page = opened.new_page(
                viewport={"width": width, "height": 1000 if width > 500 else 1700},
                color_scheme=scheme,
            )
            page.goto(server.url)
            path = directory / f"health-{name}.png"
            page.screenshot(path=path, full_page=full)
            page.close()
            _shrink(path)
            paths.append(path)
    return paths


def _shrink(path: Path) -> None:
    """Fewer colours, the rare ones kept; as it is where Pillow is not installed."""
    try:
        from PIL import Image
    except ImportError:
        return
    image = Image.open(path).convert("RGB")
    few = image.quantize(128, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    few.save(path, optimize=True)


def main() -> int:
    """Take the pictures and say where they are."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.screenshots", description="Take the health page's pictures for docs/."
    )
    parser.add_argument("--out", type=Path, default=Path("docs/images"), help="(docs/images)")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for path in take(arguments.out):
        print(f"{path}: {path.stat().st_size / 1024:.0f} KiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
