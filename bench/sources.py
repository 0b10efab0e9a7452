"""Which files of this project a benchmark runs, so that a result knows what makes it old.

Found by reading imports, those within functions included, and the names of modules that are
started as commands (``"node.join"``). Nothing is imported.
"""

import ast
import hashlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from testing.paths import ROOT

ROOMS = ("node", "coordinator", "dht", "client", "bench", "testing", "tests")
WRITERS = ("bench/report", "bench/results_", "bench/sources", "bench/papers/report")
"""Files that begin so write about figures; they measure nothing."""


def sources(module: str, root: Path = ROOT) -> dict[str, str]:
    """A hash over the files that ``module`` runs, for each folder that holds some of them.

    The files are read as they are, whether or not they are committed.
    """
    digests: dict[str, hashlib._Hash] = {}
    for path in sorted(closure(module, root)):
        name = path.relative_to(root).as_posix()
        if not name.startswith(WRITERS):
            digest = digests.setdefault(str(Path(name).parent), hashlib.sha256())
            digest.update(name.encode() + b"\0" + path.read_bytes())
    return {folder: digest.hexdigest()[:12] for folder, digest in sorted(digests.items())}


def closure(module: str, root: Path = ROOT) -> set[Path]:
    """The files that ``module`` runs, its own among them, and those that write about figures; empty
    where there is no such module."""
    found: set[Path] = set()
    waiting = list(_files(module, root))
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.add(path)
            if path.relative_to(root).as_posix().startswith(WRITERS):
                continue
            for name in _named(path.read_text()):
                waiting += _files(name, root)
    return found


def _files(module: str, root: Path) -> Iterator[Path]:
    """The file of a module, and those of the packages above it."""
    parts = module.split(".")
    if parts[0] not in ROOMS:
        return
    for count in range(1, len(parts) + 1):
        base = root.joinpath(*parts[:count])
        names = [base.with_suffix(".py"), base / "__init__.py"]
        if count == len(parts):
            names.append(base / "__main__.py")
        yield from (path for path in names if path.exists())


@cache
def _named(text: str) -> frozenset[str]:
    """Modules that a file imports, or names as a string."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found.update(each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.update((node.module, *(f"{node.module}.{each.name}" for each in node.names)))
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and "." in node.value
            and node.value.replace(".", "").isidentifier()
        ):
            found.add(node.value)
    return frozenset(found)
