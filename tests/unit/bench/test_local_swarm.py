"""Peers of a local swarm do not outlive the process that started them."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from testing.paths import ROOT

STARTS_A_SLEEPER = """
import signal, sys, time
from pathlib import Path
from testing.local_swarm import LocalSwarm, spawned

def sleeper(command, environment, log):
    return spawned([sys.executable, "-c", "import time; time.sleep(600)"], environment, log)

signal.signal(signal.SIGINT, signal.SIG_DFL)  # behind a shell's & it would be ignored
with LocalSwarm(Path("models/brook"), start=sleeper) as swarm:
    print(swarm.start_peer().process.pid, swarm.directory, flush=True)
    time.sleep(600)
"""


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_peers_end_when_their_process_is_terminated() -> None:
    command = [sys.executable, "-c", STARTS_A_SLEEPER]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid, directory = process.stdout.readline().split(maxsplit=1)
        assert _lives(int(pid))
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 128 + signal.SIGTERM
    deadline_s = time.monotonic() + 30
    while _lives(int(pid)):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    assert not Path(directory.strip()).exists()
