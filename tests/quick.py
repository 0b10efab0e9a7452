"""The tests of what changed, and the laws that most changes can break: ``make quick``.

Changed is what differs from the main branch, committed or not. A test file is chosen if it mirrors
a changed module or imports it. Tests that start processes or browsers are left to ``make test``.
"""

import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LAWS = (
    "tests/unit/dht/messages",
    "tests/unit/client/session",
    "tests/unit/node/sessions",
    "tests/unit/coordinator/plans/election",
    "tests/unit/coordinator/planning/test_planner_laws.py",
    "tests/unit/test_threat_model.py",
)
"""Run whatever changed: the wire, both session machines, elections, planners, documents."""
LEFT_OUT = "not e2e and not browser and not netns and not slow and not gpu"
SECONDS_MAX = 110
"""After these the run ends, and says so: who wants all runs ``make test``."""


def changed() -> list[str]:
    """Files that differ from the main branch; on it, those of the last commit."""
    base = _git("merge-base", "HEAD", "main") or _git("merge-base", "HEAD", "origin/main")
    if not base or base == _git("rev-parse", "HEAD"):
        base = "HEAD~1"
    status = _git("status", "--porcelain", "--untracked-files=all").splitlines()
    return sorted({*_git("diff", "--name-only", base).splitlines(), *(s[3:] for s in status)})


def chosen(files: Iterable[str], tests: Iterable[Path]) -> list[str]:
    """The test files among ``tests`` for the changed ``files``."""
    names = {file for file in files if file.endswith(".py")}
    modules = {
        name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in names
    }
    return [
        name
        for path in tests
        if (name := path.relative_to(ROOT).as_posix()) in names or modules & set(_tested(path))
    ]


def _tested(path: Path) -> Iterator[str]:
    """Modules that a test file mirrors or imports."""
    parts = path.relative_to(ROOT / "tests").with_suffix("").parts
    yield ".".join((*parts[1:-1], parts[-1].removeprefix("test_")))
    for line in re.findall(r"^from ([\w.]+) import ([\w, ]+|\()", path.read_text(), re.M):
        yield line[0]
        yield from (f"{line[0]}.{name.strip()}" for name in line[1].split(","))


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.strip("\n")


def main() -> int:
    """Run them; pytest's exit code."""
    tests = sorted(
        path for room in ("unit", "sim") for path in (ROOT / "tests" / room).rglob("test_*")
    )
    names = chosen(changed(), (path for path in tests if path.suffix == ".py"))
    print(f"{len(names)} test files for what changed, and the laws", flush=True)
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "-m", LEFT_OUT]
    command += [f"--session-timeout={SECONDS_MAX}", *dict.fromkeys((*LAWS, *names))]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
