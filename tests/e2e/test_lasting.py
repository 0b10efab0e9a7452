"""What runs on by itself still does after more than a minute, without a word of trouble.

Looks at addresses, sockets, records and clocks come every few seconds, and a part that fails three
times within a minute ends its process: shorter tests see neither.
"""

import asyncio
import sys
import urllib.request
from pathlib import Path

import pytest

from client import Swarm
from dht.process.supervision import WITHIN_S
from testing.forked import forked
from testing.local_swarm import Process, end_group
from tests.e2e.conftest import MODEL, start_swarm

pytestmark = pytest.mark.e2e

LASTS_S = 1.25 * WITHIN_S
COMMANDS = {"gateway": ("client.gateway", "health"), "page": ("client.health", "badge.svg")}
"""The module of each, and what it is asked for."""


def address_in(told: str) -> str:
    """The host and port at which a command says that it is."""
    return told.partition("http://")[2].partition("/")[0]


def test_whatever_runs_on_by_itself_still_does_after_a_minute(tmp_path: Path) -> None:
    logs = {name: tmp_path / f"{name}.log" for name in COMMANDS}
    processes: dict[str, Process] = {}

    async def ask() -> dict[str, int]:
        async with Swarm.connect(local.addresses, model=str(MODEL)) as swarm:
            await asyncio.sleep(LASTS_S)
            answer = await swarm.generate([300, 301], max_new_tokens=2, ignore_eos=True)
            assert len(answer.token_ids) == 2
            return swarm.reader.parts.failures

    with start_swarm((0.62, 0.5)) as local:
        try:
            for name, (module, _) in COMMANDS.items():
                command = [sys.executable, "-m", module, "--model", str(MODEL), "--port", "0"]
                with logs[name].open("wb") as log:
                    more = ["--initial-peers", *local.addresses]
                    processes[name] = forked([*command, *more], {}, log.fileno())
            assert asyncio.run(ask()) == {}
            told = {name: log.read_text(errors="replace") for name, log in logs.items()}
            assert {name: each.poll() for name, each in processes.items()} == dict.fromkeys(
                COMMANDS
            )
            for name, (_, path) in COMMANDS.items():
                at = f"http://{address_in(told[name])}/{path}"
                with urllib.request.urlopen(at) as answer:
                    assert answer.status == 200, told[name]
            told |= {peer.name: peer.log.read_text(errors="replace") for peer in local.peers}
            assert not [text for text in told.values() if "Traceback" in text]
            for peer in local.peers:
                stats = peer.find("stats")
                assert stats is not None
                assert stats["failures"] == {}
        finally:
            for process in processes.values():
                end_group(process.pid)
                process.wait()
