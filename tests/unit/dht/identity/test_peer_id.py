"""Identities: files, locks, signatures, peer ids."""

import subprocess
import sys
from pathlib import Path

import base58
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dht.errors import UserError
from dht.identity.peer_id import Identity, is_peer_id, verify

ROOT = Path(__file__).resolve().parents[4]


def test_the_id_survives_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "made" / "id"
    first = Identity.load_or_create(path)
    first.release()
    second = Identity.load_or_create(str(path))
    assert first.peer_id == second.peer_id
    assert first.peer_id.startswith("12D3KooW")
    assert path.read_bytes() == second.libp2p_bytes()
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert sorted(p.name for p in path.parent.iterdir()) == ["id", "id.lock"]
    assert verify(first.peer_id, b"data", second.sign(b"data"))


def test_the_peer_id_is_libp2ps() -> None:
    # The end-to-end tests check that the daemon computes the same id from the same file.
    identity = Identity(bytes(range(32)))
    assert identity.peer_id == "12D3KooWA4Xop1JaT3MHxwYMkCepYsv4iPVopMXwCz5iHYdBfeSB"
    raw = identity.libp2p_bytes()
    assert raw[:4] == bytes.fromhex("08011240")
    assert raw[4:36] == bytes(range(32))
    assert base58.b58decode(identity.peer_id)[-32:] == raw[36:]


def test_a_permissive_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "id"
    Identity.load_or_create(path).release()
    path.chmod(0o644)
    with pytest.raises(UserError, match="chmod 600"):
        Identity.load_or_create(path)
    path.chmod(0o600)
    Identity.load_or_create(path).release()


@pytest.mark.parametrize("damage", ["empty", "short", "text", "public", "long"])
def test_a_damaged_file_is_refused(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "id"
    Identity.load_or_create(path).release()
    data = path.read_bytes()
    path.write_bytes(
        {
            "empty": b"",
            "short": data[:-1],
            "text": b"-----BEGIN PRIVATE KEY-----",
            "public": data[:-1] + bytes([data[-1] ^ 1]),
            "long": data + b"\0",
        }[damage]
    )
    for _ in range(2):  # and the lock is free again after a refusal
        with pytest.raises(UserError, match="move it away"):
            Identity.load_or_create(path)


def test_a_path_that_cannot_be_used_is_the_users_mistake(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(UserError, match="give another path"):
        Identity.load_or_create(tmp_path / "file" / "id")
    (tmp_path / "dir").mkdir()
    with pytest.raises(UserError):
        Identity.load_or_create(tmp_path / "dir")


def test_one_process_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "id"
    identity = Identity.load_or_create(path)
    with pytest.raises(UserError, match=r"id is in use by another process"):
        Identity.load_or_create(path)
    code = f"from dht.identity.peer_id import Identity; Identity.load_or_create({str(path)!r})"
    other = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert "in use by another process" in other.stderr
    identity.release()
    identity.release()
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
    Identity.load_or_create(path).release()  # a process that ended holds nothing


def test_only_its_peer_signs() -> None:
    one, two = Identity.generate(), Identity.generate()
    signature = one.sign(b"data")
    assert verify(one.peer_id, b"data", signature)
    assert not verify(two.peer_id, b"data", signature)
    assert not verify(one.peer_id, b"date", signature)
    assert not verify(one.peer_id, b"data", signature[:-1])


@given(st.text(max_size=100), st.binary(max_size=20), st.binary(max_size=70))
def test_verify_never_raises(peer_id: str, data: bytes, signature: bytes) -> None:
    assert verify(peer_id, data, signature) is False


@pytest.mark.parametrize(
    "peer_id",
    ["", "x", "l0OI", "QmSoLMeWqB7YGVLJN3pNLQpmmEk35v6wYtsMGLzSr5QBU3", "1" * 52, "z" * 10_000],
)
def test_ids_without_a_key(peer_id: str) -> None:
    assert not verify(peer_id, b"", bytes(64))
    assert not is_peer_id(peer_id)
