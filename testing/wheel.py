"""The wheel of this project, and environments that have it: ``python -m testing.wheel`` tries both.

It builds the wheel, installs it with all that it needs into an empty environment, and there imports
what the documents' programs import, runs commands, and lets a peer rehearse with the bundled model.
It takes minutes and about 2 GB, so ``make wheel-test`` and continuous integration run it, not the
suite.
"""

import ast
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from testing.documents import PAGES, programs
from testing.local_swarm import ROOT

BUILT_OF = (
    *("pyproject.toml", "setup.py", "README.md", "LICENSE"),
    *("anabranch", "client", "coordinator", "dht", "node", "models/brook"),
)
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"


def copy_sources(target: Path) -> Path:
    """Copy what the wheel is built of, so that nothing is written into this clone."""
    for name in BUILT_OF:
        here, there = ROOT / name, target / name
        if here.is_dir():
            shutil.copytree(here, there, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            there.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(here, there)
    return target


def built_wheel(work: Path, *, with_own_tools: bool) -> Path:
    """Build the wheel below ``work`` with the build tools of this environment, or fetched ones."""
    sources = copy_sources(work / "sources")
    tools = ["--no-build-isolation"] if with_own_tools else []
    build = ["pip", "wheel", "--quiet", "--no-deps", *tools, "--wheel-dir", str(work)]
    subprocess.run([sys.executable, "-m", *build, str(sources)], check=True)
    (wheel,) = work.glob("*.whl")
    return wheel


def imports(program: str) -> list[str]:
    """The statements of a program that import something of this software."""
    return [
        ast.unparse(node)
        for node in ast.walk(ast.parse(program))
        if isinstance(node, ast.ImportFrom) and node.module == "anabranch"
    ]


def main() -> int:
    """Try it; returns the exit code."""
    with tempfile.TemporaryDirectory(prefix="anabranch-wheel-") as made:
        work = Path(made)
        wheel = built_wheel(work, with_own_tools=False)
        environment, home = work / "venv", work / "home"
        home.mkdir()
        venv.create(environment, with_pip=True)
        python = str(environment / "bin" / "python")

        def run(*command: str) -> None:
            print("$", *command, flush=True)
            variables = {"PATH": os.environ["PATH"], "HOME": str(home)}
            subprocess.run(command, cwd=home, env=variables, check=True)

        def pip(*words: str) -> None:
            locked = ("--constraint", str(ROOT / "locks" / "dev.txt"))
            run(python, "-m", "pip", "install", "--quiet", *words, *locked)

        pip("--index-url", TORCH_INDEX, "torch")
        pip(str(wheel))
        run(python, "-m", "pip", "check")
        for line in sorted({each for page in PAGES for p in programs(page) for each in imports(p)}):
            run(python, "-c", line)
        (brook,) = environment.glob("lib/python*/site-packages/anabranch/brook")
        for words in (
            ("--version",),
            ("networks",),
            ("plan", "--gpus", "2x3060", "--model", str(brook), "--time-limit", "1"),
            ("join", "--cpu", "--test"),
        ):
            run(str(environment / "bin" / "anabranch"), *words)
    print("the wheel works")
    return 0


if __name__ == "__main__":
    sys.exit(main())
