"""Claims that peers share an internet connection: whose they are, and the file behind them."""

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from dht.errors import UserError
from dht.identity.peer_id import Identity, is_peer_id
from dht.identity.uplink import claim_of, is_true, load_or_create_secret
from dht.messages import codec
from dht.messages.types import RECORD_BOUNDS
from tests.unit.records import record_of

SECRET = bytes(range(32))
ONE, OTHER = (Identity(bytes([number]) * 32).peer_id for number in (1, 2))


def test_peers_of_one_network_show_one_connection_and_of_another_network_another() -> None:
    one, other = claim_of(SECRET, "net", ONE), claim_of(SECRET, "net", OTHER)
    assert is_peer_id(one.uplink)
    assert one.uplink == other.uplink
    assert is_true(one, ONE)
    assert is_true(other, OTHER)
    assert claim_of(SECRET, "elsewhere", ONE).uplink != one.uplink
    assert claim_of(bytes(32), "net", ONE).uplink != one.uplink


def test_a_claim_says_nothing_of_another_peer_and_by_no_other_key() -> None:
    claim = claim_of(SECRET, "net", ONE)
    assert not is_true(claim, OTHER), "copied into another's record"
    assert not is_true(replace(claim, uplink=OTHER), ONE), "a key that did not sign it"
    assert not is_true(replace(claim, uplink=ONE), ONE), "signed by nobody but the peer"
    assert not is_true(replace(claim, signature=b""), ONE)
    assert not is_true(replace(claim, uplink="no key at all"), ONE)


def test_a_claim_leaves_room_for_all_else_that_a_record_says() -> None:
    plain = record_of(
        ONE,
        tokens_per_s=(1.5,) * 128,
        decode_layer_ns=((1, 1_400_000, 1_410_000),) * RECORD_BOUNDS.layer_times_max,
        prompt_layer_ns=((32, 1_400_000, 1_400_000),) * RECORD_BOUNDS.layer_times_max,
        addresses=(f"/ip4/100.100.100.100/tcp/31337/p2p/{ONE}",) * RECORD_BOUNDS.addresses_max,
    )
    claim = replace(claim_of(SECRET, "net", ONE), up_bytes_per_s=1.5)
    whole = codec.encode(replace(plain, uplink=claim))
    assert len(whole) <= codec.FRAME_BOUNDS.record_bytes_max
    assert len(whole) - len(codec.encode(plain)) == 161, "docs/protocol.md says so"


def test_the_secret_is_made_once_whoever_asks_first(tmp_path: Path) -> None:
    path = tmp_path / "new" / "uplink.key"
    with ThreadPoolExecutor(8) as asking:
        found = set(asking.map(load_or_create_secret, [path] * 8))
    assert len(found) == 1
    assert found == {load_or_create_secret(path)}
    assert list(path.parent.iterdir()) == [path], "nothing else is left behind"
    if os.name == "posix":
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_file_that_is_no_secret_is_named(tmp_path: Path) -> None:
    path = tmp_path / "uplink.key"
    path.write_bytes(b"short")
    path.chmod(0o600)
    with pytest.raises(UserError, match="is no uplink file"):
        load_or_create_secret(path)
    path.write_bytes(bytes(32))
    path.chmod(0o644)
    if os.name == "posix":
        with pytest.raises(UserError, match="other users can read it"):
            load_or_create_secret(path)
    with pytest.raises(UserError, match="--uplink FILE"):
        load_or_create_secret(path / "below")
