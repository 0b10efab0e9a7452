"""Processes of light peers for tests: py-libp2p, with hivemind and uvloop out of reach.

``ANABRANCH_LIGHT_PYTHON`` names the interpreter of an environment where hivemind is really not
installed (``make light-test``); otherwise this one is used, and they are hidden from it.
"""

import atexit
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from functools import cache

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


@cache
def _forks() -> "subprocess.Popen[str]":
    """Where such processes are forked from; it ends with this one, when its input does."""
    forks = subprocess.Popen(
        [PYTHON, "-m", "tests.e2e.light_forks"],
        cwd=ROOT,
        env={**os.environ, **HIDING},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(forks.communicate)
    return forks


def run_light(arguments: Sequence[str], limit_s: float = 120.0) -> str:
    """What ``python -m`` with these arguments wrote, without hivemind and uvloop; its end must be
    orderly."""
    forks = _forks()
    assert forks.stdin is not None
    assert forks.stdout is not None
    with tempfile.NamedTemporaryFile("r") as out, tempfile.NamedTemporaryFile("r") as error:
        print(json.dumps([arguments, out.name, error.name]), file=forks.stdin, flush=True)
        copy = int(forks.stdout.readline())
        late = threading.Timer(limit_s, os.kill, (copy, signal.SIGKILL))
        late.start()
        ended = int(forks.stdout.readline())
        late.cancel()
        assert ended == 0, error.read()[-3000:]
        return out.read()
