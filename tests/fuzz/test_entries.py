"""Values of the DHT, from the bytes of a request or an answer to what is stored and found."""

import asyncio
import math
from typing import Any

import msgpack
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given

from dht.daemon.dictionary import entries_of
from dht.messages.codec import MalformedError
from dht.messages.types import RECORD_BOUNDS
from tests.choices import Choices, choices
from tests.examples import examples
from tests.fuzz.laws import lawful
from tests.fuzz.values import NOT_JSON, ODD, PEOPLE, damaged, damaged_bytes
from tests.unit.dht.daemon.test_kademlia import (
    CONTEXT,
    PLACE,
    STRANGER,
    Answering,
    protocol,
    records,
    stored,
)

pytestmark = pytest.mark.property
TUPLE_EXT, DICTIONARY_EXT = 0x40, 0x50
ODD_EXT = (
    msgpack.ExtType(TUPLE_EXT, msgpack.packb([-1, -2])),
    msgpack.ExtType(TUPLE_EXT, b"\xc9\xff\xff\xff\xff\x40"),
    msgpack.ExtType(DICTIONARY_EXT, b""),
    (1 << 61) - 1,
    [[PEOPLE[0].peer_id, b"", 1.0]] * 5000,
)
KEYS = (PLACE.to_bytes(), b"", bytes(20), bytes(300))


def packed(items: object) -> bytes:
    return bytes(msgpack.packb(msgpack.ExtType(DICTIONARY_EXT, msgpack.packb(items))))


def value_of(drawn: Choices) -> bytes:
    """A dictionary of records: right, with odd values, or with odd bytes."""
    items: Any = [math.inf, 0.0, [list(each) for each in records(PEOPLE)]]
    match drawn.below(4):
        case 0:
            return packed(items)
        case 1:
            return packed(damaged(items, drawn, (*ODD, *NOT_JSON, *ODD_EXT)))
        case 2:
            return damaged_bytes(packed(items), drawn)
    value = b"\x90"
    for _ in range(drawn.below(200)):
        value = (
            b"\xc9" + len(value).to_bytes(4, "big") + bytes([drawn.one_of((0x40, 0x50))]) + value
        )
    return value


@examples(60)
@given(choices(200))
def test_bytes_are_entries_or_malformed(drawn: Choices) -> None:
    value = value_of(drawn)
    entries = lawful(lambda: entries_of(value), MalformedError)
    if entries is not None:
        assert len(entries) <= RECORD_BOUNDS.peers_max
        for author, record, expires_s in entries:
            assert (type(author), type(record), type(expires_s)) == (str, bytes, float)


@examples(25)
@given(choices(300))
def test_a_request_to_store_is_followed_as_far_as_it_is_right(drawn: Choices) -> None:
    from hivemind.p2p.p2p_daemon_bindings.control import DEFAULT_MAX_MSG_SIZE
    from hivemind.proto import dht_pb2

    count = drawn.below(4)
    author = PEOPLE[0].peer_id
    request = dht_pb2.StoreRequest(
        keys=[drawn.one_of(KEYS) for _ in range(count)],
        subkeys=[drawn.one_of((b"", b"\xc0", msgpack.packb(author))) for _ in range(count)],
        values=[value_of(drawn) for _ in range(count)],
        expiration_time=[drawn.one_of((0.0, math.nan, math.inf, 1e300)) for _ in range(count)],
        in_cache=[drawn.below(8) == 0 for _ in range(count - (drawn.below(8) == 0 < count))],
    )
    sent = request.SerializeToString()
    if len(sent) > DEFAULT_MAX_MSG_SIZE:  # the daemon hands no longer ones on
        return
    node = protocol()

    def take() -> None:
        try:
            heard = dht_pb2.StoreRequest.FromString(
                damaged_bytes(sent, drawn) if drawn.yes() else sent
            )
        except DecodeError:  # hivemind answers that itself
            return
        asyncio.run(node.rpc_store(heard, CONTEXT))

    lawful(take, MalformedError)
    assert stored(node) <= {each.peer_id for each in PEOPLE}


@examples(25)
@given(choices(300))
def test_an_answer_to_a_search_is_right_records_and_right_places(drawn: Choices) -> None:
    from hivemind.p2p.p2p_daemon_bindings.control import DEFAULT_MAX_MSG_SIZE
    from hivemind.proto import dht_pb2

    result = dht_pb2.FindResult(
        type=drawn.below(4),
        value=value_of(drawn),
        expiration_time=drawn.one_of((0.0, math.nan, math.inf)),
        nearest_node_ids=[drawn.one_of(KEYS) for _ in range(drawn.below(30))],
        nearest_peer_ids=[
            drawn.one_of((b"", STRANGER.to_bytes(), bytes(64), bytes(5000)))
            for _ in range(drawn.below(30))
        ],
    )
    sent = dht_pb2.FindResponse(results=[result] * (1 + drawn.below(2))).SerializeToString()
    if len(sent) > DEFAULT_MAX_MSG_SIZE:
        return
    node = protocol()

    def search() -> Any:
        try:
            answer = dht_pb2.FindResponse.FromString(
                damaged_bytes(sent, drawn) if drawn.yes() else sent
            )
        except DecodeError:
            return None
        told = Answering()
        told.answer = answer
        node.get_stub = lambda _: told
        return asyncio.run(node.call_find(STRANGER, [PLACE]))

    found = lawful(search, ())
    for value, near in (found or {}).values():
        assert not near
        assert value is None or set(value.value.data) <= {each.peer_id for each in PEOPLE}
