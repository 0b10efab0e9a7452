"""Reserving a slot at a relay: what counts as granted, and what a hostile relay can do."""

import asyncio
import contextlib
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dht.errors import NetworkError
from dht.identity.peer_id import Identity
from dht.messages import codec
from dht.transport.interface import RELAY_PROTOCOL, Stream
from dht.transport.relay_messages import ANSWER_BYTES_MAX
from dht.transport.relay_reservation import (
    RESERVE,
    Granted,
    circuit_addresses,
    granted_by,
    reserve,
    with_circuits,
)
from testing.network import MemoryNetwork

GRANTED = bytes.fromhex("08021a0608e096db8706220508800810002864")
"""As go-libp2p's relay answers: a status with reservation, limit, and 100."""
BY_DEFAULT = bytes.fromhex("08021a060820ad8bb70622060878108080082864")
AS_OURS = bytes.fromhex("08021a0608e096db8706220908880e1080808080102864")
ME, RELAY = (Identity(each * 32).peer_id for each in (b"m", b"r"))


def asked(answer: bytes) -> None:
    """Reserve at a relay that answers so."""

    async def body() -> None:
        network = MemoryNetwork(random.Random(1))
        relay, me = network.transport(), network.transport()

        async def serve(stream: Stream) -> None:
            assert await stream.read_exactly(len(RESERVE)) == RESERVE
            stream.write(answer)
            await stream.drain()

        await relay.serve(RELAY_PROTOCOL, serve)
        async with asyncio.timeout(5):
            await reserve(me, relay.peer_id, ())

    asyncio.run(body())


def test_a_slot_is_granted() -> None:
    asked(bytes([len(GRANTED)]) + GRANTED)
    assert granted_by(GRANTED) == Granted(status=100, call_s=1024)


def test_a_relay_that_ends_calls_early_is_none() -> None:
    with pytest.raises(NetworkError, match="after 120 s or 131072 bytes"):
        asked(bytes([len(BY_DEFAULT)]) + BY_DEFAULT)
    assert granted_by(AS_OURS) == Granted(status=100, call_s=1800, call_bytes=4 << 30)
    assert granted_by(AS_OURS).is_enough
    assert Granted(status=100).is_enough, "no limit"


def test_a_refusal_names_its_status() -> None:
    with pytest.raises(NetworkError, match="status 200"):
        asked(b"\x05\x08\x02\x28\xc8\x01")


@pytest.mark.parametrize(
    "answer",
    [
        b"\x00",
        b"\x02\x08\x02",
        b"\x04\x08\x01\x28\x64",
        b"\x02\x1a\x7f",
        b"\x02\x08\x80",
        b"\x01\x0b",
        b"\xff\xff\xff\xff\x0f",
        b"\x81\x20" + bytes(ANSWER_BYTES_MAX + 1),
    ],
)
def test_other_answers_are_refused(answer: bytes) -> None:
    with pytest.raises(codec.MalformedError):
        asked(answer)


@given(st.binary(max_size=64))
def test_no_bytes_break_it(message: bytes) -> None:
    with contextlib.suppress(codec.MalformedError):
        assert granted_by(message).call_bytes >= 0


def test_addresses_through_a_relay() -> None:
    own = (
        f"/ip4/127.0.0.1/tcp/1/p2p/{RELAY}",
        f"/ip4/1.2.3.4/tcp/5/p2p/{RELAY}",
        f"/ip4/1.2.3.4/tcp/5/p2p/{ME}",
        f"/ip4/9.9.9.9/tcp/1/p2p/{ME}/p2p-circuit/p2p/{RELAY}",
        "nonsense",
        f"/ip6/2001:db8::1/tcp/5/p2p/{RELAY}",
        f"/ip4/8.8.8.8/tcp/5/p2p/{RELAY}",
    )
    through = f"p2p/{RELAY}/p2p-circuit/p2p/{ME}"
    assert circuit_addresses(RELAY, own, ME) == (
        f"/ip4/1.2.3.4/tcp/5/{through}",
        f"/ip6/2001:db8::1/tcp/5/{through}",
    )


def test_relays_have_room_beside_a_peer_s_own_addresses() -> None:
    own = tuple(f"own{n}" for n in range(8))
    assert with_circuits(own, ()) == own
    assert with_circuits(own, ("a", "b")) == (*own[:6], "a", "b")
