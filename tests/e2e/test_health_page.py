"""The health page before a swarm of real peers."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from bench.local_swarm import ROOT
from tests.e2e.conftest import start_swarm

pytestmark = pytest.mark.e2e


def test_the_page_measures_a_real_swarm_itself(tmp_path: Path) -> None:
    swarm = start_swarm((0.62, 0.5))
    command = [sys.executable, "-m", "client.health", "--port", "0", "--every", "1"]
    process = None
    try:
        process = subprocess.Popen(
            [*command, "--data", str(tmp_path / "h.sqlite"), "--initial-peers", *swarm.addresses],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert process.stdout is not None
        line = process.stdout.readline()
        url = next(word for word in line.split() if word.startswith("http://"))
        until_s = time.monotonic() + 90
        while True:
            with urllib.request.urlopen(url + "api/v1/state") as response:  # noqa: S310
                state = json.load(response)
            served = sum(hour["tokens"] for hour in state["served"]["hours"])
            if (state["swarm"]["healthy"] and served >= 8) or time.monotonic() > until_s:
                break
            time.sleep(0.2)
        assert state["swarm"]["healthy"], state["swarm"]
        assert served >= 8, "the peers count the page's own requests"
        assert state["probes"]["ttft_p50_s"] > 0
        assert [peer["flags"] for peer in state["peers"]] == [[], []]
        assert all(peer["rtt_s"] > 0 for peer in state["peers"])
        with urllib.request.urlopen(url) as response:  # noqa: S310
            page = response.read().decode()
        assert "Healthy: every layer has" in page
        assert "127.0.0.1" not in page + json.dumps(state)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    finally:
        if process is not None and process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        swarm.stop()
