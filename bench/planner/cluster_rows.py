"""Runs a benchmark of plans cluster by cluster: rows that a result has already stay."""

import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench import report

Row = dict[str, Any]


def spread(ratios: Sequence[float]) -> dict[str, float]:
    """The least, median and largest of some ratios."""
    return {
        "least": round(min(ratios), 3),
        "median": round(statistics.median(ratios), 3),
        "most": round(max(ratios), 3),
    }


def run(
    name: str,
    about: str | None,
    result: Path,
    clusters: Sequence[str],
    row: Callable[[str], Row],
    summary: Callable[[Sequence[Row]], Row],
    argv: Sequence[str] | None,
    in_order: Callable[[Sequence[str]], Sequence[str]] = tuple,
) -> int:
    """Measure the ``clusters`` that ``result`` lacks, and write it after each.

    ``name`` and ``about`` are the benchmark's; ``in_order`` says in which order rows are written.
    """
    parser = report.parser_of(name, about, out=result)
    parser.add_argument("--only", nargs="*", metavar="CLUSTER", help="these clusters, by name")
    parser.add_argument("--rows", type=int, metavar="N", help="at most so many new rows")
    arguments = parser.parse_args(argv)
    rows: dict[str, Row] = {}
    if arguments.out.exists():
        rows = {r["cluster"]: r for r in json.loads(arguments.out.read_text())["rows"]}
    for each in [n for n in arguments.only or clusters if n not in rows][: arguments.rows]:
        rows[each] = row(each)
        print(each, rows[each], flush=True)
        ordered = [rows[n] for n in in_order([*rows])]
        report.write(
            arguments.out, {**report.provenance(0), "rows": ordered, "summary": summary(ordered)}
        )
    return 0
