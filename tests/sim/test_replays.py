"""Every simulation's seed replays identically: in another process, on a machine that is busy.

A run of some of each file's tests (:mod:`tests.sim.recording`) is compared, event by event, with a
run at the same time under another seed of Python's hashes, which yields the machine to it.
"""

import os
import subprocess
import sys
from itertools import zip_longest
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONTEXT = 3
"""Lines shown before the first that differs."""
MARKS = ("run_virtual(", "mark.virtual(")
"""A test outside this folder that says one of these runs simulations."""
PAPER = "tests/unit/coordinator/simulator/test_simulator.py"
"""Swarms on paper (:mod:`coordinator.simulator`) have a clock of their own."""
LONG = "tests/sim/test_back_pressure.py::test_prefill_waits_at_the_routes_head_and_not_before"
"""Takes as long as half of the others together; another test has the same swarm."""
TOLD_MIN = 30
"""So many tests, at least, must tell of something."""


def simulations() -> list[str]:
    """The files of all tests that run simulations."""
    here = Path(__file__)
    units = (
        path
        for path in ROOT.glob("tests/unit/**/test_*.py")
        if any(mark in path.read_text() for mark in MARKS)
    )
    files = [*here.parent.glob("test_*.py"), *units, ROOT / PAPER]
    return sorted(str(path.relative_to(ROOT)) for path in files if path != here)


def start(folder: Path, hash_seed: int, *options: str) -> "subprocess.Popen[str]":
    folder.mkdir()
    command = [sys.executable, "-m", "pytest", "-q"]
    command += ["-p", "tests.sim.recording", "-p", "no:cacheprovider", "--hypothesis-seed=0"]
    command += ["--deselect", LONG]
    command += ["-m", "not slow and not property and not hypothesis and not netns"]
    return subprocess.Popen(
        [*command, "--record-to", str(folder), *options, *simulations()],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": str(hash_seed)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def first_difference(one: Path, other: Path) -> str:
    """Where two logs part, with what came before; "" where they are the same."""
    before: list[str] = []
    with one.open() as lines, other.open() as others:
        for number, (line, another) in enumerate(zip_longest(lines, others, fillvalue=""), 1):
            if line != another:
                past = "".join(before[-CONTEXT:])
                return f"{one.stem}, event {number}:\n{past}- {line or 'end'}\n+ {another or 'end'}"
            before = [*before[-CONTEXT:], line]
    return ""


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_simulation_tells_what_happens_and_replays_from_its_seed_alone(
    tmp_path: Path,
) -> None:
    calm, busy = tmp_path / "calm", tmp_path / "busy"
    runs = [start(calm, 1), start(busy, 2, "--disturbed")]
    try:
        for run in runs:
            said, _ = run.communicate()
            assert run.returncode == 0, said[-3000:]
    finally:
        for run in runs:
            run.kill()
            run.wait()
    logs = sorted(log.name for log in calm.iterdir())
    assert logs == sorted(log.name for log in busy.iterdir())
    assert sum((calm / log).stat().st_size > 0 for log in logs) >= TOLD_MIN
    differences = [first_difference(calm / log, busy / log) for log in logs]
    assert not any(differences), "\n\n".join(filter(None, differences))
