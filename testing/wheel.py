"""The wheel of this project, and environments that have it: ``python -m testing.wheel`` tries both.

It builds the wheel and installs it, with all that it needs, into an empty environment. There it
shows the help of every command, and lets a peer rehearse with the bundled model. Then a peer and a
gateway serve that model, and every program of the documents runs against them. It takes minutes and
about 2 GB, so ``make wheel-test`` and continuous integration run it, not the suite.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from anabranch.commands import COMMANDS
from testing.documents import PAGES, imported, programs
from testing.paths import ROOT
from testing.terminal import Terminal

BUILT_OF = (
    *("pyproject.toml", "setup.py", "README.md", "LICENSE"),
    *("anabranch", "client", "coordinator", "dht", "node", "models/brook"),
)
CLIENTS = ("openai", "langchain-openai")
"""Others' packages that programs of the documents import, pinned for tests."""
NOT_INSTALLED = {"litellm"}
"""Likewise, and not pinned: the extra `compat` brings it."""
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


class Installed:
    """An environment with the wheel in it, a home of its own, and nothing of this clone."""

    def __init__(self, work: Path, wheel: Path) -> None:
        """Make it below ``work``; raises CalledProcessError where pip cannot."""
        self.home, self._programs = work / "home", work / "venv" / "bin"
        self.home.mkdir()
        venv.create(work / "venv", with_pip=True)
        # Its own index has other versions of what torch needs.
        self.pip("--no-deps", "--index-url", TORCH_INDEX, "torch")
        self.pip(str(wheel))
        self.run("python", "-m", "pip", "check")
        (self.brook,) = work.glob("venv/lib/python*/site-packages/anabranch/brook")

    @property
    def environment(self) -> dict[str, str]:
        """The variables of its commands."""
        path = f"{self._programs}:{os.environ['PATH']}"
        return {"PATH": path, "HOME": str(self.home), "LANG": "C.UTF-8"}

    def run(self, name: str, *words: str) -> None:
        """Run a program of it to its end; raises CalledProcessError where that is not 0."""
        print("$", name, *words, flush=True)
        command = [str(self._programs / name), *words]
        subprocess.run(command, cwd=self.home, env=self.environment, check=True)

    def pip(self, *words: str) -> None:
        """Install packages, in the versions that are tested, from where this machine's user has
        them from."""
        locked = ("--constraint", str(ROOT / "locks" / "dev.txt"))
        command = ["python", "-m", "pip", "install", "--quiet", *words, *locked]
        print("$", *command, flush=True)
        subprocess.run([str(self._programs / "python"), *command[1:]], cwd=self.home, check=True)

    def terminal(self, *words: str) -> Terminal:
        """Start ``anabranch`` with these words."""
        print("$ anabranch", *words, flush=True)
        command = [str(self._programs / "anabranch"), *words]
        return Terminal(
            command, environment=self.environment, directory=self.home, columns=100, lines=40
        )


def run_commands(installed: Installed) -> None:
    """Each command's help, and those that need no network."""
    for name in sorted(COMMANDS.keys() - {"completion"}):
        installed.run("anabranch", name, "--help")
    for words in (
        ("--version",),
        ("completion", "bash"),
        ("networks",),
        ("plan", "--gpus", "2x3060", "--model", str(installed.brook), "--time-limit", "1"),
        ("join", "--cpu", "--test"),
    ):
        installed.run("anabranch", *words)


def run_programs(installed: Installed) -> None:
    """Every program of the documents, against a peer and a gateway of the wheel's own."""
    installed.pip(*CLIENTS)
    (installed.home / "models").mkdir()
    (installed.home / "models" / "brook").symlink_to(installed.brook)
    alone = ("--cpu", "--memory", "0.5", "--host", "127.0.0.1")
    with installed.terminal("join", *alone) as peer:
        invitation = peer.wait_for(r"ask (anabranch:\S+)")[1]
        peer.wait_for(r"^serving: layers")
        with installed.terminal("serve", invitation) as gateway:
            gateway.wait_for(r"serving .*http://127\.0\.0\.1:8000")
            for page in PAGES:
                for number, program in enumerate(programs(page), start=1):
                    which = f"{page.name}, program {number}"
                    if lacking := imported(program) & NOT_INSTALLED:
                        print(f"skipped: {which} needs {', '.join(lacking)}", flush=True)
                        continue
                    print(f"# {which}", flush=True)
                    installed.run("python", "-c", program.replace("anabranch:…", invitation))


def main() -> int:
    """Try it; returns the exit code."""
    with tempfile.TemporaryDirectory(prefix="anabranch-wheel-") as made:
        work = Path(made)
        installed = Installed(work, built_wheel(work, with_own_tools=False))
        run_commands(installed)
        run_programs(installed)
    print("the wheel works")
    return 0


if __name__ == "__main__":
    sys.exit(main())
