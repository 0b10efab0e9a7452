"""What every result file says of where it comes from, and how its figures become a table."""

import argparse
import hashlib
import json
import os
import platform
import re
import string
import subprocess
import sys
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench.local_swarm import ROOT

PACKAGES = ("node", "coordinator", "dht", "client")
WRITERS = ("report", "results")
"""Names in ``bench`` that begin so are figures or write about them; all the others measure."""


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


def code(root: Path = ROOT) -> dict[str, Any]:
    """The code that measures: its trees, which a rebase keeps, and the commit as a hint. The commit
    ends in ``+changes`` where the packages had changes that were not committed."""
    paths = (*PACKAGES, "bench", ":!bench/results")
    changed = git(root, "status", "--porcelain", "--", *paths)
    commit = git(root, "rev-parse", "--short", "HEAD")
    return {"commit": commit + ("+changes" if changed else ""), "trees": trees(root)}


def trees(root: Path = ROOT, revision: str = "HEAD") -> dict[str, str]:
    """Git's hash of every package at ``revision``, and one over what measures in ``bench``."""
    listed = git(root, "ls-tree", revision, *PACKAGES).splitlines()
    found = {name: tree[:12] for _, _, tree, name in map(str.split, listed)}
    names = git(root, "ls-tree", "-r", revision, "bench/").splitlines()
    measures = "\n".join(
        line for line in names if not any(part.startswith(WRITERS) for part in Path(line).parts)
    )
    return found | ({"bench": hashlib.sha256(measures.encode()).hexdigest()[:12]} if names else {})


def git(root: Path, *arguments: str) -> str:
    """What Git says of the repository at ``root``; nothing where it fails."""
    done = subprocess.run(
        ["git", *arguments], cwd=root, capture_output=True, text=True, check=False
    )
    return done.stdout.strip()


def _module() -> str:
    started = Path(sys.argv[0])
    return "bench." + (started.parent.name if started.stem == "__main__" else started.stem)


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((li.split(":", 1)[1].strip() for li in lines if li.startswith("model name")), "?")


def parser_of(module: str, description: str | None) -> argparse.ArgumentParser:
    """A benchmark's parser; its description keeps its lines."""
    return argparse.ArgumentParser(
        prog=f"python -m {module}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def write(path: Path | None, result: dict[str, Any]) -> None:
    """Write ``result`` as indented JSON, if there is a ``path``."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n")


class _Cells(string.Formatter):
    """Formats of cells: ``{name:ms}`` is seconds in whole milliseconds; what is None or missing is
    a dash."""

    def get_value(self, key: int | str, args: Any, kwargs: Mapping[Any, Any]) -> Any:
        return kwargs.get(key)

    def format_field(self, value: Any, format_spec: str) -> str:
        if value is None:
            return "–"
        return f"{1e3 * value:.0f}" if format_spec == "ms" else format(value, format_spec)


def fill(cells: str, row: Mapping[Any, Any]) -> str:
    """The format ``cells`` with a row's figures."""
    return _Cells().vformat(cells, (), row)


def table(heads: str, cells: str, rows: Iterable[Mapping[Any, Any]]) -> str:
    """A Markdown table: a line for each of ``rows``, whose figures fill in the format ``cells``.

    ``|`` stands between columns; one whose heading ends in ``:`` is aligned to the right.
    """
    rule = ["--:" if head.rstrip().endswith(":") else "---" for head in heads.split("|")]
    lines = [re.sub(r":(?= \||$)", "", heads), *(fill(cells, row) for row in rows)]
    head, *body = (f"| {line} |" for line in lines)
    return "\n".join([head, f"|{'|'.join(rule)}|", *body])


def made(name: str, command: str | None = None) -> str:
    """Where a figure comes from: the command and the file."""
    return f"(`python -m bench.{command or name}`, [JSON](bench/results/{name}.json))"
