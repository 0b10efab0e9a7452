"""Processes of light peers for tests: py-libp2p, with hivemind and uvloop out of reach.

``ANABRANCH_LIGHT_PYTHON`` names the interpreter of an environment where hivemind is really not
installed (``make light-test``); otherwise this one is used, and they are hidden from it.
"""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence

import pytest

from testing.paths import ROOT

PYTHON = os.environ.get("ANABRANCH_LIGHT_PYTHON", sys.executable)
HIDING = {
    "PYTHONPATH": os.pathsep.join(
        [str(ROOT / "tests" / "e2e" / "without_daemon"), os.environ.get("PYTHONPATH", "")]
    ).rstrip(os.pathsep)
}
needs_libp2p = pytest.mark.skipif(
    sys.executable == PYTHON and importlib.util.find_spec("libp2p") is None,
    reason="needs py-libp2p: make light-test",
)


def start_light(arguments: Sequence[str]) -> "subprocess.Popen[str]":
    """A process of this project's without the daemon's libraries."""
    return subprocess.Popen(
        [PYTHON, *arguments],
        cwd=ROOT,
        env={**os.environ, **HIDING},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_light(arguments: Sequence[str], limit_s: float = 120.0) -> str:
    """What such a process wrote; its end must be orderly, without hivemind and uvloop."""
    process = start_light(arguments)
    try:
        out, err = process.communicate(timeout=limit_s)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, err[-3000:]
    return out
