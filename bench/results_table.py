"""Writes what README.md and the documents under docs/ say of ``bench/results``.

``python -m bench.results_table`` replaces what stands between two markers by the template in
``bench/reports`` that the first of them names: no figure is typed by hand.
"""

import json
import re
import statistics
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jinja2

from bench import report, results_figures, results_stale
from bench.papers import report as papers
from bench.papers.recipes import RECIPES
from coordinator.policies.admission.config import ADMISSION
from testing.paths import ROOT

RESULTS, TEMPLATES = ROOT / "bench" / "results", ROOT / "bench" / "reports"
DOCUMENTS = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
MARKED = re.compile(
    r"(?P<begin><!-- figures: bench/reports/(?P<template>\w+).md.j2 -->\n\n).*?"
    r"(?P<end>\n\n<!-- end of figures -->)",
    re.DOTALL,
)


def recorded() -> dict[str, dict[str, Any]]:
    """Every result file by its name."""
    return {
        str(path.relative_to(RESULTS).with_suffix("")): json.loads(path.read_text())
        for path in sorted(RESULTS.rglob("*.json"))
    }


def _table(text: str, rows: Iterable[Any]) -> str:
    """A Markdown table of ``rows``: ``text`` has its headings, an empty line, and its cells."""
    heads, cells = (" ".join(part.split()) for part in text.strip().split("\n\n"))
    return report.table(heads, cells, rows) + "\n"


def environment() -> jinja2.Environment:
    """What templates can call, and the filters ``f`` (a figure's format) and ``table``."""
    made = jinja2.Environment(  # noqa: S701 - Markdown of our own figures
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.filters |= {"f": report.figure, "table": _table}
    made.globals |= {"median": statistics.median, "ADMISSION": ADMISSION}
    for module in (report, results_figures, results_stale, papers):
        made.globals |= {n: each for n, each in vars(module).items() if not n.startswith("_")}
    return made


def render(template: str, read: Callable[[str], dict[str, Any]], **more: Any) -> str:
    """A template's text with what ``read`` gives for the name of a result.

    Its paragraphs become lines; tables and lists keep theirs.
    """
    text = environment().get_template(f"{template}.md.j2").render(read=read, **more)
    paragraphs = (part.strip() for part in re.split(r"\n\s*\n", text))
    return "\n\n".join(
        part if part.startswith("|") else re.sub(r"\s*\n(?!- )", " ", part)
        for part in paragraphs
        if part
    )


def written(document: Path) -> str:
    """A document with what the templates that its markers name say today."""
    results = recorded()

    def part(found: re.Match[str]) -> str:
        more = {"results": results, "recipes": list(RECIPES)}
        text = render(found["template"], results.__getitem__, **more)
        if document.parent.name == "docs":  # links start at the root
            text = text.replace("](bench/", "](../bench/").replace("](docs/", "](")
        return found["begin"] + text + found["end"]

    return MARKED.sub(part, document.read_text())


def main() -> int:
    for document in DOCUMENTS:
        document.write_text(written(document))
    return 0


if __name__ == "__main__":
    sys.exit(main())
