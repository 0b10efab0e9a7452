"""What every result file says of where it comes from, and how its figures become a table."""

import argparse
import json
import math
import os
import platform
import re
import string
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench.__main__ import benchmarks
from bench.sources import sources
from testing.paths import ROOT


def provenance(seed: int) -> dict[str, Any]:
    """Code, machine, versions and seed."""
    return {
        **code(),
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "command": " ".join(["python", "-m", _module(), *sys.argv[1:]]),
        "seed": seed,
    }


def code(root: Path = ROOT, module: str | None = None) -> dict[str, Any]:
    """The code that measures: the benchmark, a hash for each folder of which files run, and the
    commit as a hint."""
    module = module or _module()
    return {"commit": commit(root), "module": module, "sources": sources(module, root)}


def commit(root: Path = ROOT) -> str:
    """The commit that is checked out, with ``+changes`` where something was not committed."""
    changed = git(root, "status", "--porcelain", "--", ".", ":!bench/results")
    return git(root, "rev-parse", "--short", "HEAD") + ("+changes" if changed else "")


def git(root: Path, *arguments: str) -> str:
    """What Git says of the repository at ``root``; nothing where it fails."""
    done = subprocess.run(
        ["git", *arguments], cwd=root, capture_output=True, text=True, check=False
    )
    return done.stdout.strip()


def _module() -> str:
    """The benchmark that runs, by the name that ``python -m`` took."""
    spec = sys.modules["__main__"].__spec__
    return spec.name.removesuffix(".__main__") if spec else Path(sys.argv[0]).stem


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((li.split(":", 1)[1].strip() for li in lines if li.startswith("model name")), "?")


def parser_of(
    module: str, description: str | None, out: Path | None = None, *, writes: bool = True
) -> argparse.ArgumentParser:
    """A benchmark's parser, with ``--out`` where it ``writes``; its description keeps its lines."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if writes:
        parser.add_argument("--out", type=Path, metavar="FILE", default=out, help="write JSON here")
    return parser


def write(path: Path | None, result: dict[str, Any]) -> None:
    """Write ``result`` as indented JSON, if there is a ``path``."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n")


def earlier(path: Path | None) -> dict[str, Any]:
    """The result in a file, to go on with; empty where there is none."""
    found: dict[str, Any] = {}
    if path is not None and path.exists():
        found = json.loads(path.read_text())
    return found


def percentile(values: Iterable[float], share: float) -> float:
    """The value at a share of all, by nearest rank; 0 without values."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0


def look(row: Any, path: str) -> Any:
    """What stands at a ``path`` of keys and places, as in ``name[key][0]``; None without it."""
    for part in re.findall(r"[^\[\]]+", path):
        try:
            row = row[int(part) if isinstance(row, list | tuple) else part]
        except (KeyError, IndexError, TypeError):
            return None
    return row


def of(row: Mapping[str, Any], part: str, whole: str) -> float | None:
    """The quotient of what stands at two paths; None where one of them is missing."""
    above, below = look(row, part), look(row, whole)
    return None if above is None or below is None else above / below


def flat(nested: Mapping[str, Any], *names: str) -> list[dict[str, Any]]:
    """The innermost of mappings within mappings, with the key of each level under its name."""
    if not names:
        return [dict(nested)]
    return [
        {names[0]: key, **row}
        for key, inner in nested.items()
        if isinstance(inner, Mapping)
        for row in flat(inner, *names[1:])
    ]


FORMATS: dict[str, Callable[[Any], str]] = {
    "ms": lambda seconds: f"{1e3 * seconds:.0f}",
    "words": lambda name: name.replace("_", " "),
    "yes": lambda told: "yes" if told else "no",
}
"""Formats of figures beside Python's own: whole milliseconds of seconds, a name, a truth."""


def figure(value: Any, form: str = "") -> str:
    """A figure in a format; a dash for what is None."""
    if value is None:
        return "–"
    return FORMATS[form](value) if form in FORMATS else format(value, form)


class _Cells(string.Formatter):
    """Formats of cells: ``{path:format}``; what is None or missing is a dash."""

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> Any:
        return look(kwargs, field_name), field_name

    def format_field(self, value: Any, format_spec: str) -> str:
        return figure(value, format_spec)


def fill(cells: str, row: Any) -> str:
    """The format ``cells`` with a row's figures."""
    return _Cells().vformat(cells, (), row)


def table(heads: str, cells: str, rows: Iterable[Any]) -> str:
    """A Markdown table: a line for each of ``rows``, whose figures fill in the format ``cells``.

    ``|`` stands between columns; one whose heading ends in ``:`` is aligned to the right.
    """
    rule = ["--:" if head.rstrip().endswith(":") else "---" for head in heads.split("|")]
    lines = [re.sub(r":(?= \||$)", "", heads), *(fill(cells, row) for row in rows)]
    head, *body = (f"| {line} |" for line in lines)
    return "\n".join([head, f"|{'|'.join(rule)}|", *body])


def made(name: str, command: str | None = None) -> str:
    """Where a figure comes from: the command and the file."""
    module, *options = (command or name).split()
    (started,) = (
        each for each in benchmarks() if module in {each.split(".")[-1], each.replace(".", "_")}
    )
    ran = " ".join(["python -m bench", started, *options])
    return f"(`{ran}`, [JSON](bench/results/{name}.json))"
