"""With what the libp2p daemon is started, and whose its sockets are."""

import asyncio
import errno
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from dht.daemon.process import (
    DaemonConfig,
    P2pDaemon,
    SocketDirectory,
    _arguments,
)
from dht.errors import MachineError, UserError
from dht.identity.peer_id import Identity

LISTENING = ("/ip4/1.2.3.4/tcp/5",)


@pytest.mark.parametrize("listens", [True, False])
@pytest.mark.parametrize("nat_traversal", [True, False])
def test_the_daemon_passes_nothing_on(listens: bool, nat_traversal: bool) -> None:
    config = DaemonConfig(
        binary=Path("p2pd"),
        identity=Identity(b"i" * 32),
        host_addresses=LISTENING if listens else (),
        nat_traversal=nat_traversal,
    )
    arguments = _arguments(config, Path("control"), Path("identity"))
    assert "-relayService=0" in arguments
    assert not any("forceReachability" in each for each in arguments)


@pytest.fixture
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_living_peers_sockets_stay_whatever_its_process_id_means_here(
    parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In another PID namespace, the owner's process id is nobody's."""
    monkeypatch.setattr(os, "getpid", lambda: 2**22 - 1)
    first = SocketDirectory.make()
    (first.path / "p2pd.sock").touch()
    monkeypatch.undo()
    monkeypatch.setattr(tempfile, "tempdir", str(parent))
    second = SocketDirectory.make()
    assert first.is_whole(first.path / "p2pd.sock")
    assert second.is_whole()
    first.remove()
    first.remove()
    assert not first.is_whole()
    second.remove()


DIES = """
import os, sys, tempfile
from dht.daemon.process import SocketDirectory
tempfile.tempdir = sys.argv[1]
print(SocketDirectory.make().path, flush=True)
os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("letter", ["u", "ü"])
def test_sockets_have_short_paths_wherever_temporary_files_are(
    letter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A unix socket's limit counts bytes."""
    free = 104 - len("/anabranch-p2p-12345678") - len("/p2pclient-0123456789a.sock")
    below = Path(tempfile.mkdtemp(dir="/tmp", prefix="x"))
    try:
        characters = free - len(os.fsencode(below)) - 2
        long = below / (letter * (characters + 4 * (letter == "u")))
        long.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(long))
        made = SocketDirectory.make()
        assert len(os.fsencode(made.path / "p2pclient-0123456789a.sock")) < 104
        assert list(long.iterdir()) == []
        made.remove()
    finally:
        shutil.rmtree(below)


def test_what_a_killed_process_left_is_removed(parent: Path) -> None:
    died = subprocess.run(
        [sys.executable, "-c", DIES, str(parent)], check=False, capture_output=True, text=True
    )
    left = Path(died.stdout.strip())
    assert left.exists()
    SocketDirectory.make().remove()
    assert not left.exists()


def test_what_software_without_locks_made_stays(parent: Path) -> None:
    older = parent / "anabranch-p2p-older"
    older.mkdir()
    (older / "owner").write_text("4194303")
    SocketDirectory.make().remove()
    assert older.exists()


def test_a_daemon_whose_socket_was_removed_cannot_be_reached(parent: Path) -> None:
    daemon = P2pDaemon(SocketDirectory.make())
    attached = daemon.directory / "p2pclient-1.sock"
    for each in (daemon.control_path, attached):
        each.touch()
    assert daemon.can_be_reached()
    attached.unlink()
    assert not daemon.can_be_reached()
    attached.touch()
    shutil.rmtree(daemon.directory)
    assert not daemon.can_be_reached()


@pytest.mark.parametrize(
    ("number", "kind", "told"),
    [(errno.EAGAIN, MachineError, "runs too much"), (errno.ENOENT, UserError, "reinstall")],
)
def test_a_daemon_that_cannot_run_is_blamed_on_what_is_wrong(
    number: int, kind: type[Exception], told: str, parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit on this user's processes is no broken installation."""

    async def refused(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(asyncio, "create_subprocess_exec", refused)
    config = DaemonConfig(binary=Path("p2pd"), identity=Identity(b"i" * 32), host_addresses=())
    with pytest.raises(kind, match=told):
        asyncio.run(P2pDaemon.start(config))
    assert not list(parent.glob("anabranch-p2p-*"))
