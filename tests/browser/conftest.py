"""One browser for the tests of a file; they are skipped where there is none."""

from collections.abc import Iterator
from typing import Any

import pytest

from testing.browser import browser, chromium

HIT = "window.hit = []; window.x = () => window.hit.push(1); window.alert = window.x;"
"""What payloads call, and what counts them."""


@pytest.fixture(scope="module")
def opened() -> Iterator[Any]:
    pytest.importorskip("playwright", reason="playwright is not installed")
    if chromium() is None:
        pytest.skip("no Chromium is installed")
    with browser() as started:
        yield started


def findings(page: Any) -> list[str]:
    """What axe-core finds on the page, as ``rule: element``."""
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page).response
    assert found["passes"], "axe looked at nothing"
    return [
        f"{each['id']}: {node['html']}" for each in found["violations"] for node in each["nodes"]
    ]


def contrast(one: str, other: str) -> float:
    """WCAG 2's contrast ratio of two ``rgb(r, g, b)``."""

    def luminance(colour: str) -> float:
        parts = [int(part) / 255 for part in colour[4:-1].split(",")]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return sum(w * p for w, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)
