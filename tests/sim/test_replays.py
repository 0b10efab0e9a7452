"""Every simulation's seed replays identically: in another process, on a machine that is busy.

A run of some of each file's tests (:mod:`tests.sim.recording`) is compared, event by event, with a
run under another seed of Python's hashes, beside a process that computes all the time.
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
MARK = "run_virtual("
"""A test outside this folder that says so runs simulations."""
PAPER = "tests/unit/coordinator/simulator/test_simulator.py"
"""Swarms on paper (:mod:`coordinator.simulator`) have a clock of their own."""
LONG = "tests/sim/test_back_pressure.py::test_prefill_waits_at_the_routes_head_and_not_before"
"""Takes as long as half of the others together; another test has the same swarm."""
TOLD_MIN = 30
"""So many tests, at least, must tell of something."""


def simulations() -> list[str]:
    """The files of all tests that run simulations."""
    here = Path(__file__)
    units = (p for p in ROOT.glob("tests/unit/**/test_*.py") if MARK in p.read_text())
    files = [*here.parent.glob("test_*.py"), *units, ROOT / PAPER]
    return sorted(str(path.relative_to(ROOT)) for path in files if path != here)


def start(folder: Path, hash_seed: int, *options: str) -> "subprocess.Popen[str]":
    folder.mkdir()
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.sim.recording"]
    command += ["-p", "no:cacheprovider", "--hypothesis-seed=0", "--deselect", LONG]
    command += ["-m", "not slow and not property and not netns"]
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


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the first run's logs, and room for the second's."""
    folder = tmp_path_factory.mktemp("runs")
    burner = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        run = start(folder / "busy", 1)
        said, _ = run.communicate()
        assert run.returncode == 0, said[-3000:]
    finally:
        burner.kill()
        burner.wait()
    return folder


@pytest.mark.slow
def test_every_simulation_tells_what_happens(runs: Path) -> None:
    assert sum(log.stat().st_size > 0 for log in (runs / "busy").iterdir()) >= TOLD_MIN


@pytest.mark.slow
def test_every_simulation_replays_from_its_seed_alone(runs: Path) -> None:
    calm, busy = runs / "calm", runs / "busy"
    run = start(calm, 2, "--collect-nothing")
    said, _ = run.communicate()
    assert run.returncode == 0, said[-3000:]
    logs = sorted(log.name for log in calm.iterdir())
    assert logs == sorted(log.name for log in busy.iterdir())
    differences = [first_difference(calm / log, busy / log) for log in logs]
    assert not any(differences), "\n\n".join(filter(None, differences))
