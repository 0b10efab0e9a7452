"""Claims that peers share an internet connection, which nobody can make for another.

The machines behind a connection share a secret file. Of it and the network's name follows a key
pair, so peers of one owner in two networks are not told to belong together. The key signs each
peer's id; the peer puts the signature into its own record, which it signs. So who does not have the
secret cannot place himself behind somebody's connection, and nobody can place a stranger behind
his own. Who makes up a connection shares it with his own identities alone, and a plan gives all of
these together what it would otherwise give to each.
"""

import hashlib
import os
from functools import lru_cache
from pathlib import Path

from dht.errors import UserError, reason_of
from dht.identity.peer_id import KEY_BYTES, Identity, verify
from dht.messages.types import UplinkClaim
from dht.process.secret_file import check_private, write_private

CLAIM_PREFIX = b"anabranch-uplink-v1\0"


def load_or_create_secret(path: Path) -> bytes:
    """The secret in the file ``path``, 32 bytes, created if missing; several processes may ask at
    the same time. Raises UserError, which says what to do, where the file cannot be used."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            write_private(path, os.urandom(KEY_BYTES), keeps=True)
        with path.open("rb") as opened:
            secret = opened.read(KEY_BYTES + 1)
    except OSError as error:
        raise UserError(
            f"cannot use uplink file {path}: {reason_of(error)}; give another path with"
            " --uplink FILE"
        ) from error
    check_private(path, "uplink file")
    if len(secret) != KEY_BYTES:
        raise UserError(f"{path} is no uplink file; move it away to get a new one")
    return secret


def claim_of(secret: bytes, network: str, peer_id: str) -> UplinkClaim:
    """The claim of a peer of ``network`` that it is behind the connection with this secret."""
    seed = hashlib.blake2b(CLAIM_PREFIX + network.encode(), key=secret, digest_size=KEY_BYTES)
    uplink = Identity(seed.digest())
    return UplinkClaim(uplink=uplink.peer_id, signature=uplink.sign(_signed_bytes(peer_id)))


@lru_cache(maxsize=8192)
def _is_signed(uplink: str, peer_id: str, signature: bytes) -> bool:
    return verify(uplink, _signed_bytes(peer_id), signature)


def is_true(claim: UplinkClaim, peer_id: str) -> bool:
    """Whether the connection's key signed that ``peer_id`` is behind it; never raises."""
    return _is_signed(claim.uplink, peer_id, claim.signature)


def _signed_bytes(peer_id: str) -> bytes:
    return CLAIM_PREFIX + peer_id.encode()
