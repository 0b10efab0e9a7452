"""Pictures of the pages for docs/, of swarms on paper."""

import argparse
import asyncio
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from dht.process.json_file import Json
from testing import paper_health
from testing.browser import PageServer, browser, first_paint_ms
from tests.unit.client.gateway.beside import gateway_beside

CHAT_PEERS = {
    "Aino's desktop": (0, 2),
    "attic-3060": (2, 5),
    "uni-lab-2": (5, 7),
    "t4-spare": (7, 8),
    "kestrel": (0, 2),
}
SAYS = (
    "An anabranch leaves its river and finds it again further down.\n\n"
    "So does an answer here: where one bed runs dry, it takes another."
)
MARKDOWN = r"""## Binary search

It halves a **sorted** list until one place is left: at most $\lceil \log_2 (n+1) \rceil$ steps.

$$T(n) = T\left(\frac{n}{2}\right) + O(1) = O(\log n)$$

```python
def search(values: list[int], wanted: int) -> int | None:
    '''The place of `wanted`, or None.'''
    low, high = 0, len(values)  # half-open
    while low < high:
        middle = (low + high) // 2
        if values[middle] < wanted:
            low = middle + 1
        else:
            high = middle
    return low if low < len(values) else None
```

| Case | Steps for 1,000,000 | Memory |
|:-----|------:|:------:|
| best | 1 | constant |
| worst | 20 | constant |
"""
SHOTS: tuple[tuple[str, Callable[[], Json], int, str, bool], ...] = (
    ("healthy", paper_health.healthy, 1280, "light", True),
    ("dark", paper_health.healthy, 1280, "dark", False),
    ("layer-lost", paper_health.layer_lost, 1280, "light", False),
    ("ghost", paper_health.ghost, 1280, "light", True),
    ("200-peers", partial(paper_health.many, 200), 1920, "dark", False),
    ("500-peers", paper_health.many, 1280, "light", False),
    ("phone", paper_health.healthy, 390, "light", False),
)
"""Name, state of :mod:`testing.paper_health`, width, scheme, whether the whole page is taken."""


def take(directory: Path) -> dict[Path, float]:
    """Write all pictures; returns for each path how long its page took to be seen, in ms, from
    the beginning of the request to the first contentful paint."""
    taken = {}
    with PageServer({}) as server, browser() as opened:
        for name, state, width, scheme, full in SHOTS:
            server.state = state()
            page = opened.new_page(
                viewport={"width": width, "height": 1000 if width > 500 else 1700},
                color_scheme=scheme,
            )
            page.goto(server.url)
            path = directory / f"health-{name}.png"
            taken[path] = first_paint_ms(page)
            page.screenshot(path=path, full_page=full)
            page.close()
            _shrink(path)
    return taken


def chat(directory: Path) -> Path:
    """Write the picture of the gateway's chat while a peer is replaced; returns its path."""
    path = directory / "chat-rerouting.png"
    with gateway_beside() as gateway, browser() as opened:
        swarm = gateway.swarm
        gateway.do(lambda: swarm.serve(CHAT_PEERS))
        swarm.says, swarm.loses_at, swarm.mended = SAYS, 22, asyncio.Event()
        page = opened.new_page(viewport={"width": 1000, "height": 480})
        page.goto(gateway.url)
        page.locator("#model option", has_text="brook").wait_for(state="attached")
        page.locator("#box").fill("What is an anabranch?")
        page.keyboard.press("Enter")
        page.locator(".event.now").wait_for()
        page.locator(".text", has_text="further").wait_for()
        page.screenshot(path=path)
        gateway.do(swarm.mended.set)
    return path


def chat_markdown(directory: Path) -> Path:
    """Write the picture of an answer with Markdown in the gateway's chat; returns its path."""
    path = directory / "chat-markdown.png"
    with gateway_beside(context_tokens=8192) as gateway, browser() as opened:
        gateway.do(lambda: gateway.swarm.serve(CHAT_PEERS))
        gateway.swarm.says = MARKDOWN
        page = opened.new_page(viewport={"width": 1280, "height": 960})
        page.goto(gateway.url)
        page.locator("#model option", has_text="brook").wait_for(state="attached")
        page.locator("#box").fill("How does binary search work? Show it in Python.")
        page.keyboard.press("Enter")
        page.locator(".text[aria-busy=false]").wait_for()
        page.locator("#chats .open").wait_for()
        page.screenshot(path=path)
    _shrink(path)
    return path


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
        prog="python -m bench.demo.screenshots", description="Take the pages' pictures for docs/."
    )
    parser.add_argument("--out", type=Path, default=Path("docs/images"), help="(docs/images)")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for path, first_view_ms in take(arguments.out).items():
        print(f"{path}: {path.stat().st_size / 1024:.0f} KiB, seen after {first_view_ms:.0f} ms")
    for picture in (chat, chat_markdown):
        path = picture(arguments.out)
        print(f"{path}: {path.stat().st_size / 1024:.0f} KiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
