"""One command with two devices: two peers that serve one network, and leave it together."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from testing.paths import ROOT
from tests.e2e.conftest import MODEL

pytestmark = pytest.mark.e2e

ON_THE_CPU = """
import asyncio, sys
from node.peer import join_options
from node.peer.gpu_peers import commands_of, run_beside
arguments = join_options.parse()
arguments.gpus = 0, 1
def on_cpu(command):
    made = lambda invitation: [
        "--cpu" if word.startswith("--gpu=") else word for word in command(invitation)
    ]
    return made
commands = [on_cpu(command) for command in commands_of(arguments, sys.argv[1:])]
sys.exit(asyncio.run(run_beside(arguments.gpus, commands)))
"""
"""``node.join --gpu 0,1`` on a machine without a GPU: both peers compute on the CPU."""


def test_two_peers_of_one_command(tmp_path: Path) -> None:
    given = ("--model", str(MODEL), "--identity", str(tmp_path / "key"), "--host", "127.0.0.1")
    starter = subprocess.Popen(
        [sys.executable, "-c", ON_THE_CPU, *given, "--memory", "1", "--threads", "1", "--json-log"],
        cwd=ROOT,
        env={**os.environ, "ANABRANCH_MEMORY": ""},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert starter.stderr is not None
    serving, left, names = set(), set(), {}
    try:
        for line in starter.stderr:
            if not line.startswith("{"):  # notes for people
                continue
            event = json.loads(line)
            if event["event"] == "listening":
                names[event["gpu"]] = event["peer_id"]
            if event["event"] == "serving":
                serving.add(event["gpu"])
                if serving == {0, 1}:
                    starter.send_signal(signal.SIGINT)
            if event["event"] == "left":
                left.add(event["gpu"])
        assert starter.wait() == 0
    finally:
        starter.kill()
        starter.wait()
    assert left == {0, 1}
    assert len(set(names.values())) == 2
    assert (tmp_path / "key-gpu1").exists()
