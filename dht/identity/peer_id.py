"""Peer identities: Ed25519 key pairs whose public half is in the peer id.

The identity file is libp2p's protobuf ``PrivateKey``, which any libp2p implementation can read. A
peer id is the base58 text of the identity multihash of the protobuf public key
(https://github.com/libp2p/specs/blob/master/peer-ids/peer-ids.md), ``12D3KooW…``, so a signature
can be checked with the signer's peer id alone.
"""

import importlib
import os
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

import base58
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from dht.errors import UserError, reason_of
from dht.process.secret_file import check_private, write_private

fcntl: Any
try:
    fcntl = importlib.import_module("fcntl")
except ImportError:  # missing on Windows, where two processes may share a file unnoticed
    fcntl = None

KEY_BYTES = 32
"""Fixed by Ed25519: length of a public key or a seed."""
SIGNATURE_BYTES = 64
"""Fixed by Ed25519."""
_PEER_ID_CHARS_MAX = 64
_PRIVATE_HEAD = bytes([0x08, 0x01, 0x12, 2 * KEY_BYTES])
"""Protobuf PrivateKey: field 1 (type) = Ed25519, field 2 (data) = seed and public key."""
_PUBLIC_HEAD = bytes([0x00, KEY_BYTES + 4, 0x08, 0x01, 0x12, KEY_BYTES])
"""Identity multihash of a protobuf PublicKey: hash code 0, length, then type and data."""


class Identity:
    """A peer's key pair. It holds the lock of its file, if any, until :meth:`release`."""

    def __init__(self, seed: bytes, *, path: Path | None = None, lock: IO[bytes] | None = None):
        self._key = Ed25519PrivateKey.from_private_bytes(seed)
        self._seed = seed
        self._public = self._key.public_key().public_bytes_raw()
        self._lock = lock
        self.path = path
        """File of the key; None: the key is in memory only."""
        self.peer_id: str = base58.b58encode(_PUBLIC_HEAD + self._public).decode()

    def __repr__(self) -> str:
        return f"Identity({self.peer_id})"

    @classmethod
    def generate(cls) -> "Identity":
        """Create an identity in memory, for clients and tests."""
        return cls(os.urandom(KEY_BYTES))

    @classmethod
    def load_or_create(cls, path: str | os.PathLike[str]) -> "Identity":
        """The identity in the file ``path``, created if missing and locked for this process.

        Raises UserError, which says what to do, when the file cannot be read or written, is not an
        identity, can be read by other users, or is in use by another process.
        """
        file = Path(path).expanduser()
        try:
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if file.exists():
                _content(file)  # what is no identity gets no lock file beside it
            lock = _take_lock(file)
            try:
                seed = _read(file) if file.exists() else _create(file)
            except BaseException:
                if lock is not None:
                    lock.close()
                raise
        except OSError as error:
            raise UserError(
                f"cannot use identity file {file}: {reason_of(error)}; give another path"
                " with --identity FILE"
            ) from error
        return cls(seed, path=file, lock=lock)

    def sign(self, data: bytes) -> bytes:
        """The signature of ``data``, 64 bytes."""
        return self._key.sign(data)

    def seed(self) -> bytes:
        """The private key, 32 bytes."""
        return self._seed

    def libp2p_bytes(self) -> bytes:
        """The protobuf ``PrivateKey``, which is also the content of the identity file."""
        return _PRIVATE_HEAD + self._seed + self._public

    def release(self) -> None:
        """Unlock the identity file for other processes. May be called twice."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def is_peer_id(text: str) -> bool:
    """Whether ``text`` is a peer id that carries an Ed25519 key."""
    return _public_key(text[: _PEER_ID_CHARS_MAX + 1]) is not None


def peer_id_bytes(peer_id: str) -> bytes:
    """The bytes of a peer id; raises ValueError for text that is none."""
    raw: bytes = base58.b58decode(peer_id)
    return raw


def peer_id_of(raw: bytes) -> str:
    """The peer id with these bytes, or a text that is no peer id."""
    text: str = base58.b58encode(raw).decode()
    return text


def short_name(peer_id: str) -> str:
    """A peer's name for people: the last 8 characters of its id; names that are not ids, whole."""
    return peer_id[-8:] if is_peer_id(peer_id) else peer_id


def verify(peer_id: str, data: bytes, signature: bytes) -> bool:
    """Whether ``signature`` of ``data`` was made by ``peer_id``; never raises."""
    key = _public_key(peer_id[: _PEER_ID_CHARS_MAX + 1])
    if key is None or len(signature) != SIGNATURE_BYTES:
        return False
    try:
        key.verify(signature, data)
    except InvalidSignature:
        return False
    return True


@lru_cache(maxsize=8192)
def _public_key(peer_id: str) -> Ed25519PublicKey | None:
    if len(peer_id) > _PEER_ID_CHARS_MAX:
        return None
    try:
        raw = base58.b58decode(peer_id)
    except ValueError:
        return None
    # Only the canonical text of the bytes is accepted, so that one key is never two peers.
    if raw[:6] != _PUBLIC_HEAD or len(raw) != 6 + KEY_BYTES:
        return None
    if base58.b58encode(raw).decode() != peer_id:
        return None
    try:
        return Ed25519PublicKey.from_public_bytes(raw[6:])
    except ValueError:
        return None


def _take_lock(file: Path) -> IO[bytes] | None:
    if fcntl is None:
        return None
    lock = open(file.with_name(file.name + ".lock"), "ab")  # noqa: SIM115  (held until release)
    try:
        os.chmod(lock.name, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise UserError(
            f"identity file {file} is in use by another process; stop it, or give another with"
            " --identity"
        ) from None
    except BaseException:
        lock.close()
        raise
    return lock


def _read(file: Path) -> bytes:
    data = _content(file)
    check_private(file, "identity file")
    seed, public = data[4 : 4 + KEY_BYTES], data[4 + KEY_BYTES :]
    if Ed25519PrivateKey.from_private_bytes(seed).public_key().public_bytes_raw() != public:
        raise UserError(f"identity file {file} is damaged; move it away to get a new one")
    return seed


def _content(file: Path) -> bytes:
    with file.open("rb") as opened:
        data = opened.read(1 << 12)
    if len(data) != 4 + 2 * KEY_BYTES or not data.startswith(_PRIVATE_HEAD):
        raise UserError(
            f"{file} is no Ed25519 identity; move it away to get a new one, or give another with"
            " --identity FILE"
        )
    return data


def _create(file: Path) -> bytes:
    """Create the identity file with a new key; returns its seed."""
    identity = Identity.generate()
    write_private(file, identity.libp2p_bytes())
    return identity._seed
