"""What the pages for browsers cost a visitor: files, bytes, and the time until something is seen.

Each visit is a new browser context of headless Chromium on this machine, so that nothing is cached.
The chat is that of a gateway; the health page shows a swarm of 7 peers and one of 500. Their swarms
are simulated: the pages, their servers and the browser are real. The first contentful paint counts
from the beginning of the request; bytes are those on the wire, headers included.
"""

import argparse
import statistics
import sys
from typing import Any

from rich.console import Console

from bench import report
from testing import paper_health
from testing.browser import PageServer, browser, first_paint_ms
from tests.unit.client.gateway.beside import gateway_beside

VISITS = 9


def visit(opened: Any, url: str) -> dict[str, float]:
    """One visit without a cache: files and bytes that came, and the first paint in ms."""
    context = opened.new_context()
    try:
        page = context.new_page()
        session, lengths = context.new_cdp_session(page), []
        session.on(
            "Network.loadingFinished", lambda told: lengths.append(told["encodedDataLength"])
        )
        session.send("Network.enable")
        page.goto(url, wait_until="networkidle")
        return {
            "files": len(lengths),
            "kb": sum(lengths) / 1e3,
            "first_paint_ms": first_paint_ms(page),
        }
    finally:
        context.close()


def visits(opened: Any, url: str, count: int) -> dict[str, Any]:
    """``count`` visits and their medians; one before them fills the server's own caches."""
    each = [visit(opened, url) for _ in range(1 + count)][1:]
    medians = {name: statistics.median(one[name] for one in each) for name in each[0]}
    return {**medians, "visits": each}


def main() -> int:
    """Visit the pages, say what they cost, and write the result."""
    parser: argparse.ArgumentParser = report.parser_of("bench.speed.pages", __doc__)
    parser.add_argument("--visits", type=int, default=VISITS, help=f"of each page ({VISITS})")
    parser.add_argument("--note", default="", help="said in the result, as of a shared machine")
    arguments = parser.parse_args()
    pages: dict[str, Any] = {}
    with browser() as opened:
        version = opened.version
        with gateway_beside() as gateway:
            pages["chat"] = visits(opened, gateway.url, arguments.visits)
        with PageServer({}) as server:
            for name, state in (
                ("health, 7 peers", paper_health.healthy),
                ("health, 500 peers", paper_health.many),
            ):
                server.state = state()
                pages[name] = visits(opened, server.url, arguments.visits)
    result = {**report.provenance(0), "chromium": version, "note": arguments.note, "pages": pages}
    Console().print(pages)
    report.write(arguments.out, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
