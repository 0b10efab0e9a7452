"""The documents' site: every page is where somebody looks for it, and nothing foreign is loaded."""

from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]


class _Loader(yaml.SafeLoader):
    """Reads the names of functions, which MkDocs looks up, as text."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/name:", lambda _, suffix, __: suffix)


@pytest.fixture(scope="module")
def site() -> dict[str, Any]:
    read = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader=_Loader)  # noqa: S506
    assert isinstance(read, dict)
    return read


def test_every_page_is_in_the_navigation_once(site: dict[str, Any]) -> None:
    start, *parts = site["nav"]
    below = [each for part in parts for each in next(iter(part.values()))]
    pages = [start, *(page for each in below for page in each.values())]
    assert sorted(pages) == sorted(path.name for path in (ROOT / "docs").glob("*.md"))


def test_the_site_has_a_search_and_loads_no_fonts_of_others(site: dict[str, Any]) -> None:
    assert "search" in site["plugins"]
    assert site["theme"]["font"] is False
    assert (ROOT / site["docs_dir"]).is_dir()
