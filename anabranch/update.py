"""``anabranch update``: install the newest version from where ``install.sh`` installed this one."""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from dht.command_line import COMMAND, EXIT_DONE, Parser, exit_code_of, own_process
from dht.errors import MachineError, UserError

SOURCE = "anabranch-source"
"""File in the private environment that names what was installed: a directory, a wheel, an address,
or a package. ``install.sh`` and ``install.ps1`` write it."""
SOURCE_CHARACTERS_MAX = 4096


def source_of(environment: Path) -> str:
    """What was installed in this environment. Raises UserError where the installers made none."""
    try:
        with (environment / SOURCE).open(encoding="utf-8-sig") as file:
            source = file.read(SOURCE_CHARACTERS_MAX).strip()
    except (OSError, UnicodeDecodeError):
        source = ""
    if not source:
        raise UserError(
            "this copy was not installed by install.sh or install.ps1: in a clone `git pull` brings"
            " the newest version, else what installed it, such as `pip install --upgrade`"
        )
    return source


def steps(source: str, pip: Sequence[str]) -> list[list[str]]:
    """The commands that install the newest version of ``source`` with this ``pip``."""
    is_clone = (Path(source) / ".git").exists()
    pulls = [["git", "-C", source, "pull", "--ff-only"]] if is_clone else []
    # pip installs a directory anew also where its version is the same.
    return [*pulls, [*pip, "install", "--upgrade", source]]


def parse() -> argparse.Namespace:
    """The command's arguments; raises UserError."""
    parser = Parser(
        prog="python -m anabranch.update",
        usage="%(prog)s [options]",
        description="Install the newest version from where install.sh installed this one.",
        epilog="example: %(prog)s --dry-run",
        exit_codes="0 done, 1 a step failed, 2 it was installed otherwise",
    )
    parser.add_argument("--dry-run", action="store_true", help="only say what would be run")
    return parser.parse_args()


def update() -> int:
    """Run the steps and say which version is there; raises UserError and MachineError."""
    arguments = parse()
    source = source_of(Path(sys.prefix))
    before = metadata.version(COMMAND)
    for step in steps(source, own_process("pip")):
        print(" ".join(step), flush=True)
        if arguments.dry_run:
            continue
        try:
            code = subprocess.run(step, check=False).returncode
        except OSError as error:
            raise MachineError(f"{step[0]} cannot be run: {error.strerror}") from None
        if code != 0:
            raise MachineError(f"this step failed: {' '.join(step)}; what it says stands above")
    if not arguments.dry_run:
        after = subprocess.run(
            [*own_process(), "--version"],
            capture_output=True,
            text=True,
            check=False,
        ).stdout.strip()
        print(f"{after} (before: {before}); peers that run go on with the old one until they end")
    return EXIT_DONE


def run() -> int:
    """Run ``anabranch update``; returns its exit code."""
    return exit_code_of(update)


if __name__ == "__main__":
    sys.exit(run())
