"""Which recorded results are older than the code that they measured (``bench.results_table``)."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.papers.jobs import fingerprint
from bench.papers.recipes import RECIPES
from bench.sources import sources
from testing.paths import ROOT

UNKNOWN = "measured before results named the files that they ran"


def stale(results: dict[str, dict[str, Any]], root: Path = ROOT) -> dict[str, list[str]]:
    """Why each of the ``results`` is not of today's code; what is of that code is left out."""
    found = {name: _reasons(result, root) for name, result in results.items()}
    return {name: reasons for name, reasons in found.items() if reasons}


def by_reasons(results: dict[str, dict[str, Any]]) -> list[tuple[str, list[str]]]:
    """The same for a document: what has the same reasons together, after these reasons."""
    found: dict[str, list[str]] = {}
    for name, reasons in sorted(stale(results).items()):
        found.setdefault("; ".join(reasons), []).append(name)
    return sorted(found.items())


def _reasons(result: dict[str, Any], root: Path) -> list[str]:
    if result.get("recipe") in RECIPES:
        return _lines_made_before(result)
    stamps = list(_stamps(result))
    if not stamps or not all("sources" in stamp for stamp in stamps):
        return [UNKNOWN]
    run: set[str] = set()
    changed: set[str] = set()
    for stamp in stamps:
        now = sources(stamp["module"], root)
        then = stamp["sources"]
        run |= now.keys() | then.keys()
        changed |= {folder for folder in now | then if now.get(folder) != then.get(folder)}
    rooms = sorted({folder.partition("/")[0] for folder in changed})
    said = f"changed since: {len(changed)} of {len(run)} folders, in {', '.join(rooms)}"
    return [said] if changed else []


def _stamps(part: object) -> Iterator[dict[str, Any]]:
    """Everything in a result that says which code made it; some were made bit by bit."""
    if isinstance(part, dict):
        if "commit" in part:
            yield part
        part = list(part.values())
    if isinstance(part, list):
        for each in part:
            yield from _stamps(each)


def _lines_made_before(result: dict[str, Any]) -> list[str]:
    """The papers' recipes hash their sources, so for them that is known exactly."""
    named = RECIPES[result["recipe"]].sources
    old = sum(row["fingerprint"] != fingerprint(named) for row in result["rows"])
    return [f"made by other sources than today's ({', '.join(named)})"] if old else []
