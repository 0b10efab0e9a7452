"""The health page before an installed Chromium: a server on a thread, and a browser to look."""

import asyncio
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import web

from client.health.app import Page
from dht.process.json_file import Json


def chromium() -> str | None:
    """Where Chromium is installed, if it is."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)


@contextmanager
def browser() -> Iterator[Any]:
    """A headless Chromium; raises RuntimeError where there is none."""
    from playwright.sync_api import sync_playwright

    path = chromium()
    if path is None:
        raise RuntimeError("no Chromium is installed")
    # Without a sandbox: containers often forbid it, and only pages of ours are opened.
    with sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        try:
            yield opened
        finally:
            opened.close()


FIRST_PAINT_MS = """new Promise(tell => new PerformanceObserver(seen =>
  tell(seen.getEntriesByName("first-contentful-paint")[0]?.startTime))
  .observe({ type: "paint", buffered: true }))"""


def first_paint_ms(page: Any) -> float:
    """From the beginning of a page's request to its first contentful paint, in ms."""
    return float(page.evaluate(FIRST_PAINT_MS))


class PageServer:
    """The page on a free port, showing whatever ``state`` is set to."""

    def __init__(self, state: Json) -> None:
        self.state = state
        self.page = Page(lambda: self.state)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self.url = ""

    def __enter__(self) -> "PageServer":
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(30)
        return self

    async def _start(self) -> None:
        self._runner = web.AppRunner(self.page.app, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/"

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
