"""Real peers under faults of the world around them; ``bench.faults`` draws more at random."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from bench.faults.lab import SUBNET, Cables, Place, child_of, heeds, why_no_clock, why_no_lab
from dht.daemon.transport import HivemindTransport
from dht.errors import MachineError
from dht.identity.peer_id import Identity
from dht.messages.types import NodeState, model_key
from dht.networks.connecting import observe
from dht.records.directory import DEFAULT_NETWORK, Directory
from dht.transport.config import TransportConfig
from testing.paths import ROOT
from tests.e2e.conftest import MODEL, start_swarm

pytestmark = pytest.mark.e2e
NO_CLOCK = why_no_clock()
NO_LAB = why_no_lab()
NO_ROOT = None if os.geteuid() == 0 and shutil.which("unshare") else "needs root and unshare"
LIMIT_S = 120.0


def until(holds: Callable[[], bool], what: str) -> None:
    """Wait until something holds."""
    until_s = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < until_s, what
        time.sleep(0.05)


async def _serving(address: str, count: int) -> None:
    """Until this many peers are seen to serve, by who asks this one."""
    transport = await observe([address])
    try:
        directory = Directory(transport, DEFAULT_NETWORK, model_key(MODEL.name))
        async with asyncio.timeout(LIMIT_S):
            states: list[NodeState] = []
            while states.count(NodeState.SERVING) < count:
                await asyncio.sleep(0.2)
                states = [each.state for each in (await directory.nodes(latest=True)).values()]
    finally:
        await transport.close()


@pytest.mark.slow
@pytest.mark.skipif(NO_CLOCK is not None, reason=str(NO_CLOCK))
def test_a_clock_that_was_hours_ahead_is_said_and_does_no_harm_after(tmp_path: Path) -> None:
    place = Place(directory=tmp_path)
    with start_swarm((1.0,)) as swarm:
        peer = swarm.start_peer(environment=place.environment)
        swarm.wait_serving()
        for ahead_s, way in ((8 * 3600.0, 1), (0.0, -1)):
            since = len(peer.read_events())
            place.set_clock(ahead_s)
            jump = peer.wait_for("clock", since=since)["jump_s"]
            assert jump * way == pytest.approx(8 * 3600.0, abs=30.0)
        asyncio.run(_serving(swarm.peers[0].address, 2))


@pytest.mark.parametrize("is_client", [False, True])
async def test_one_whose_sockets_were_removed_ends_with_words(
    monkeypatch: pytest.MonkeyPatch, is_client: bool
) -> None:
    monkeypatch.setattr("dht.daemon.transport.SOCKETS_PERIOD_S", 0.1)

    identity = Identity.generate()
    config = TransportConfig(identity=identity, host="127.0.0.1", client_mode=is_client)
    transport = await HivemindTransport.create(config)
    try:
        assert transport._daemon is not None
        shutil.rmtree(transport._daemon.directory)
        async with asyncio.timeout(LIMIT_S):
            with pytest.raises(MachineError, match="removed by another program"):
                await transport.wait_ended()
    finally:
        await transport.close()


LIVES = """
import asyncio, sys
from dht.daemon.transport import HivemindTransport
from dht.identity.peer_id import Identity
from dht.transport.config import TransportConfig
async def main():
    config = TransportConfig(identity=Identity.generate(), host="127.0.0.1")
    transport = await HivemindTransport.create(config)
    print(transport._daemon.can_be_reached(), flush=True)
    while sys.stdin.readline():
        print(transport._daemon.can_be_reached(), flush=True)
    await transport.close()
asyncio.run(main())
"""


@pytest.mark.netns
@pytest.mark.skipif(NO_ROOT is not None, reason=str(NO_ROOT))
def test_peers_of_two_pid_namespaces_share_a_temporary_directory(tmp_path: Path) -> None:
    shared = Path(tempfile.mkdtemp(prefix="af-"))  # a socket's path is short
    running = []
    try:
        for number, name in enumerate(("one", "two")):
            place = Place(directory=tmp_path / name, own_pids=True, shared_tmp=shared)
            others = "true & wait; " * 20 * (number + 1)  # its id is nobody's in the other one
            command = [*place.command, "sh", "-c", f'{others} "$@"; true', "sh"]
            command += [sys.executable, "-c", LIVES]
            environment = {**os.environ, "TMPDIR": str(shared)}
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            running.append(process)
            assert process.stdout is not None
            assert process.stdout.readline().strip() == "True"
        for process in running:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write("still?\n")
            process.stdin.flush()
            assert process.stdout.readline().strip() == "True"
    finally:
        for process in running:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(60)
        shutil.rmtree(shared, ignore_errors=True)


HELD_IMPORT = """
import pathlib, sys, time

class Holding:
    def find_spec(self, name, path=None, target=None):
        if name == "hivemind":
            pathlib.Path({begun!r}).touch()
            while not pathlib.Path({goes_on!r}).exists():
                time.sleep(0.01)

sys.meta_path.insert(0, Holding())
"""
"""A ``sitecustomize`` by which an import waits until it may go on."""


@pytest.mark.netns
@pytest.mark.skipif(NO_ROOT is not None, reason=str(NO_ROOT))
@pytest.mark.parametrize("shell", ["exec", "trap '' INT; exec"], ids=["", "in the background"])
def test_sigterm_ends_a_peer_that_is_pid_1_while_it_still_imports(
    tmp_path: Path, shell: str
) -> None:
    begun, goes_on = tmp_path / "begun", tmp_path / "goes on"
    held = HELD_IMPORT.format(begun=str(begun), goes_on=str(goes_on))
    (tmp_path / "sitecustomize.py").write_text(held)
    place = Place(directory=tmp_path / "peer", own_pids=True)
    join = [sys.executable, "-m", "node.join", "--model", str(MODEL), "--cpu", "--json-log"]
    join += ["--identity", str(tmp_path / "id.key"), "--host", "127.0.0.1"]
    process = subprocess.Popen(
        [*place.command, "sh", "-c", f'{shell} "$@"', "sh", *join],
        cwd=ROOT,
        env={**os.environ, "ANABRANCH_MEMORY": "", "PYTHONPATH": str(tmp_path)},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        until(begun.exists, "no import has begun")
        until(lambda: heeds(child_of(process.pid), signal.SIGTERM), "SIGTERM is not heeded")
        os.kill(child_of(process.pid), signal.SIGTERM)
        goes_on.touch()
        said = process.communicate(timeout=LIMIT_S)[1]
    finally:
        process.kill()
        process.wait()
    assert "listening" not in said, "it ended before it had joined"


class Meeting:
    """A peer on a host of the lab that says whom it knows."""

    def __init__(self, cables: Cables, host: int, initial: list[str]) -> None:
        command = [sys.executable, "-m", "tests.e2e.meeting_peer", "31337"]
        self.process = subprocess.Popen(
            cables.run(host, [*command, *initial]),
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()
        self.peer_id = self.address.rpartition("/")[2]
        self.known: set[str] = set()
        self.reading = threading.Thread(target=self._read, daemon=True)
        self.reading.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.known = set(line.split())

    def stop(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(30)
        self.reading.join()


def _know(peers: list[Meeting]) -> bool:
    """Whether these peers know each other, and nobody else."""
    return all(peer.known == {each.peer_id for each in peers} for peer in peers)


@pytest.mark.netns
@pytest.mark.slow
@pytest.mark.skipif(NO_LAB is not None, reason=str(NO_LAB))
def test_a_network_without_its_founder_is_one_again_after_a_cut() -> None:
    """Also where one of them has another address since: it knows the others."""
    with Cables(4) as cables, ExitStack() as stack:
        founder = Meeting(cables, 0, [])
        stack.callback(founder.stop)
        others = [Meeting(cables, host, [founder.address]) for host in (1, 2, 3)]
        for each in others:
            stack.callback(each.stop)
        until(lambda: _know([founder, *others]), "all meet")
        founder.stop()
        until(lambda: _know(others), "who left is forgotten")
        cables.part((1,))
        until(lambda: _know(others[:1]) and _know(others[1:]), "both sides know only themselves")
        cables.move(1, f"{SUBNET}.99")  # one of them comes back with another address
        cables.part(())
        until(lambda: _know(others), "all meet again")
