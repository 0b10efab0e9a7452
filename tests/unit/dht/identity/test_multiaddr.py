"""Multiaddresses of peers, as people and other peers give them."""

import pytest

from dht.errors import UserError
from dht.identity.multiaddr import (
    checked_tcp,
    circuits_of,
    dialled_of,
    split,
    split_all,
    split_circuit,
    tcp_address,
    unanswered,
)
from dht.identity.peer_id import Identity
from dht.messages.types import RECORD_BOUNDS

ALICE, BOB = Identity(b"a" * 32).peer_id, Identity(b"b" * 32).peer_id


def test_a_full_address_is_split_into_peer_and_place() -> None:
    assert split(f"/ip4/1.2.3.4/tcp/31337/p2p/{ALICE}") == (ALICE, "/ip4/1.2.3.4/tcp/31337")
    assert split(f"/dns4/example.org/tcp/1/p2p/{ALICE}/") == (ALICE, "/dns4/example.org/tcp/1")


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("/ip4/1.2.3.4/tcp/31337", "lacks the peer id"),
        (f"/p2p/{ALICE}", "lacks the peer id"),
        ("/ip4/1.2.3.4/tcp/31337/p2p/alice", "no peer id"),
        (f"/ip4/1.2.3.4/udp/31337/p2p/{ALICE}", "/tcp"),
        (f"/ip4/1.2.3.4/tcp/99999/p2p/{ALICE}", "no TCP port"),
        (f"/ip4/1.2.3.4/tcp/31337/p2p/{BOB}/p2p-circuit/p2p/{ALICE}", "directly"),
        (f"/ip4//tcp/1/p2p/{ALICE}", "no host"),
        ("", "lacks the peer id"),
    ],
)
def test_what_is_no_address_says_why(address: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        split(address)
    with pytest.raises(UserError, match="it looks like /ip4/"):
        split_all((address,))


def test_addresses_are_collected_by_peer() -> None:
    given = (f"/ip4/1.1.1.1/tcp/1/p2p/{ALICE}", f"/ip4/2.2.2.2/tcp/2/p2p/{ALICE}")
    assert split_all(given) == {ALICE: ("/ip4/1.1.1.1/tcp/1", "/ip4/2.2.2.2/tcp/2")}


def test_what_others_tell_is_taken_only_where_it_makes_sense() -> None:
    told = (
        "nonsense",
        f"/ip4/1.1.1.1/tcp/1/p2p/{BOB}",
        f"/ip4/2.2.2.2/tcp/2/p2p/{ALICE}",
        *(f"/ip4/3.3.3.3/tcp/{port}/p2p/{ALICE}" for port in range(100)),
    )
    dialled = dialled_of(ALICE, told)
    assert dialled[0] == "/ip4/2.2.2.2/tcp/2"
    assert len(dialled) <= 8


def test_a_listening_address_needs_a_port() -> None:
    assert checked_tcp("/ip6/::1/tcp/0") == "/ip6/::1/tcp/0"
    with pytest.raises(ValueError, match="directly"):
        checked_tcp("127.0.0.1:80")


def test_addresses_through_relays_name_the_relay_and_the_peer() -> None:
    relay = f"/ip4/1.2.3.4/tcp/5/p2p/{ALICE}"
    told = (
        f"/ip4/9.9.9.9/tcp/1/p2p/{BOB}",
        f"{relay}/p2p-circuit/p2p/{BOB}",
        f"{relay}/p2p-circuit/p2p/{ALICE}",
        f"{relay}/p2p-circuit/p2p/{BOB}/p2p-circuit/p2p/{BOB}",
        f"/ip4/1.2.3.4/tcp/5/p2p/{BOB}/p2p-circuit/p2p/{BOB}",
        f"/p2p/{ALICE}/p2p-circuit/p2p/{BOB}",
        f"/ip4/1.2.3.4/udp/5/p2p/{ALICE}/p2p-circuit/p2p/{BOB}",
        "/p2p-circuit/p2p/",
    )
    assert circuits_of(BOB, told) == (f"{relay}/p2p-circuit",)
    assert circuits_of(BOB, told[:1] * RECORD_BOUNDS.addresses_max + told) == (), "bounded"
    assert split_circuit(f"{relay}/p2p-circuit") == (ALICE, "/ip4/1.2.3.4/tcp/5")
    assert split_circuit("/ip4/1.2.3.4/tcp/5") is None


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("203.0.113.7:31337", "/ip4/203.0.113.7/tcp/31337"),
        ("[2001:db8::7]:4001", "/ip6/2001:db8::7/tcp/4001"),
        ("gpu.example.org:4001", "/dns/gpu.example.org/tcp/4001"),
        ("/dns4/gpu.example.org/tcp/4001", "/dns4/gpu.example.org/tcp/4001"),
    ],
)
def test_a_host_with_a_port_is_an_address(text: str, address: str) -> None:
    assert tcp_address(text) == address


@pytest.mark.parametrize(
    "text", ["", "gpu.example.org", "203.0.113.7:", "a:b:4001", "a:70000", "a/b:1", ":1", "/ip4/1"]
)
def test_what_is_no_host_with_a_port_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"HOST:PORT|host|TCP|tcp"):
        tcp_address(text)


def test_nobody_answers_at_many_addresses_is_a_short_line() -> None:
    first, *others = (f"/ip4/192.0.2.{n}/tcp/31337/p2p/{ALICE}" for n in range(1, 9))
    dialled = "[/ip4/192.0.2.{0}/tcp/31337] dial tcp4 192.0.2.{0}:31337: connect: {1}"
    said = ["connection refused"] * 7 + ["no route to host"]
    parts = [dialled.format(n, why) for n, why in enumerate(said, 1)]
    reason = "all dials failed " * 3 + " * " + " * ".join(parts)
    refused = "nobody answers at {} (connection refused; no route to host): is {}"
    assert str(unanswered([first], [reason, reason])) == refused.format(
        first, "that peer running, and is this the address that it printed last?"
    )
    many = "one of these peers running, and are these the addresses that they printed last?"
    assert str(unanswered([first, *others], [reason])) == refused.format(
        f"{first} or 7 more addresses", many
    )
    assert f"{first} or 1 more address (no" in str(unanswered([first, others[0]], ["no answer"]))
