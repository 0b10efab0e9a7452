"""What a joining peer offers on its local network, where it says that it does not, and what it says
of files that it cannot serve."""

import argparse
import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from dht.identity.peer_id import Identity
from dht.transport.config import TransportKind
from node.join import offer_here
from node.owner.reporter import Reporter
from tests.unit.records import MODEL

PEER = Identity(b"1" * 32).peer_id
LOOPBACK, PUBLIC, PRIVATE = (
    f"/ip4/{host}/tcp/31330/p2p/{PEER}" for host in ("127.0.0.1", "1.1.1.1", "10.0.0.7")
)


@pytest.mark.parametrize(
    ("addresses", "kind", "offered", "said"),
    [
        ((LOOPBACK, PUBLIC, PRIVATE), TransportKind.DAEMON, (PRIVATE,), "10.0.0.7:31330"),
        ((LOOPBACK, PUBLIC), TransportKind.DAEMON, None, "Not offered on this network"),
        ((PRIVATE,), TransportKind.LIGHT, None, "A light peer lets nobody in"),
    ],
)
def test_a_peer_offers_private_addresses_where_others_can_join_through_it(
    addresses: tuple[str, ...], kind: TransportKind, offered: tuple[str, ...] | None, said: str
) -> None:
    arguments = argparse.Namespace(name="gaming-pc", network="lab", transport=kind)
    out = io.StringIO()
    offer = offer_here(arguments, addresses, MODEL, Reporter(json_log=False, out=out))
    assert (offer and offer.invitation.addresses) == offered
    assert said in out.getvalue()
    assert "1.1.1.1" not in out.getvalue()


def truncated(file: Path) -> str:
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_tensor("token_embd.weight", np.ones((4, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file.write_bytes(file.read_bytes()[:-64])
    return "its header promises"


def of_no_known_architecture(file: Path) -> str:
    writer = gguf.GGUFWriter(file, "starlight")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return "does not read its architecture 'starlight'"


@pytest.mark.parametrize("write", [truncated, of_no_known_architecture])
def test_a_gguf_file_that_cannot_be_served_is_the_users_mistake_in_a_line(
    write: Callable[[Path], str], tmp_path: Path
) -> None:
    words = write(tmp_path / "m.gguf")
    given = ("--model", str(tmp_path / "m.gguf"), "--identity", str(tmp_path / "identity.key"))
    done = subprocess.run(
        [sys.executable, "-m", "node.join", *given, "--network", "nobody-is-there"],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HOME": str(tmp_path / "home")},
        check=False,
    )
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert words in line
    assert not (tmp_path / "identity.key").exists()
