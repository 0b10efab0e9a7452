"""Which recorded results are older than the code that they measured (``bench.results_table``)."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from bench import report
from bench.local_swarm import ROOT
from bench.papers.__main__ import RECIPES
from bench.papers.jobs import fingerprint

UNKNOWN = "unknown: measured before trees were stamped"
DIRTY = "measured with changes that were not committed"


def stale(results: dict[str, dict[str, Any]], root: Path = ROOT) -> dict[str, list[str]]:
    """Why each of the ``results`` is not of the code at HEAD; what is of that code is left out."""
    now = report.trees(root)
    found = {name: _reasons(result, now, root) for name, result in results.items()}
    return {name: reasons for name, reasons in found.items() if reasons}


def warning(results: dict[str, dict[str, Any]]) -> str:
    """The same as a list for a document, results with the same reasons in one line."""
    by_reasons: dict[str, list[str]] = {}
    for name, reasons in sorted(stale(results).items()):
        by_reasons.setdefault("; ".join(reasons), []).append(name)
    now = ", ".join(f"{name} `{tree}`" for name, tree in report.trees().items())
    lines = [f"- {', '.join(names)}: {reasons}" for reasons, names in sorted(by_reasons.items())]
    return (
        "## Figures older than the code\n\nResults carry Git's hash of each package that they were"
        " measured with, which a rebase does not change. Nothing below is known to be wrong, but"
        f" the code has changed since, or may have; compared with {now}:\n\n"
        + "\n".join(lines or ["- none"])
    )


def _reasons(result: dict[str, Any], now: dict[str, str], root: Path) -> list[str]:
    if result.get("recipe") in RECIPES:
        return _lines_made_before(result)
    stamps = list(_stamps(result))
    known = [stamp.get("trees") or _trees_at(root, stamp["commit"]) for stamp in stamps]
    changed = {name for trees in known for name in trees if trees[name] != now.get(name)}
    reasons = [f"changed since: {', '.join(sorted(changed))}"] if changed else []
    if not known or not all(known):
        reasons.append(UNKNOWN)
    if any(stamp["commit"].endswith("+changes") for stamp in stamps):
        reasons.append(DIRTY)
    return reasons


def _stamps(part: object) -> Iterator[dict[str, Any]]:
    """Everything in a result that says which code made it; some were made bit by bit."""
    if isinstance(part, dict):
        if "commit" in part:
            yield part
        part = list(part.values())
    if isinstance(part, list):
        for each in part:
            yield from _stamps(each)


@cache
def _trees_at(root: Path, commit: str) -> dict[str, str]:
    """The trees of a commit that is still in the history."""
    commit = commit.removesuffix("+changes")
    holders = report.git(root, "rev-list", "HEAD").splitlines()
    found = [each for each in holders if each.startswith(commit)]
    return report.trees(root, found[0]) if commit and len(found) == 1 else {}


def _lines_made_before(result: dict[str, Any]) -> list[str]:
    """The papers' recipes hash their sources, so for them that is known exactly."""
    sources = RECIPES[result["recipe"]].sources
    old = sum(row["fingerprint"] != fingerprint(sources) for row in result["rows"])
    return [f"made by other sources than today's ({', '.join(sources)})"] if old else []
