"""What a node of the DHT makes of requests and answers, without a network."""

import asyncio
import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest

from dht.budget import DHT_FOUND_BYTES, DHT_STORE_BYTES, Budget, Limit, RateLimit
from dht.daemon import lean_hivemind
from dht.identity.peer_id import Identity
from dht.messages.codec import MalformedError
from dht.records.signed import KEEPING, RecordGuard, sign_record

lean_hivemind.prepare_hivemind()

from hivemind.dht.routing import DHTID  # noqa: E402
from hivemind.dht.storage import DictionaryDHTValue  # noqa: E402
from hivemind.p2p import PeerID  # noqa: E402
from hivemind.proto import dht_pb2  # noqa: E402
from hivemind.utils import MSGPackSerializer  # noqa: E402

from dht.daemon import kademlia  # noqa: E402
from dht.daemon.kademlia import RecordProtocol, RecordValidator, node_id_of  # noqa: E402

KEY = "net/model/nodes"
PLACE = DHTID.generate(source=KEY)
PEOPLE = [Identity(number.to_bytes(32, "big")) for number in range(1, 31)]
STRANGER = PeerID.from_base58(PEOPLE[0].peer_id)
CONTEXT = SimpleNamespace(remote_id=STRANGER)


def soon_s() -> float:
    """A time at which records have not expired yet."""
    return time.time() + 60


def protocol(*limits: Limit) -> Any:
    """A node that is connected to nobody."""

    async def made() -> Any:
        me = PeerID.from_base58(PEOPLE[-1].peer_id)
        made = await RecordProtocol.create(
            SimpleNamespace(peer_id=me),
            node_id_of(me),
            kademlia.BUCKET_PEERS,
            kademlia.DEPTH_MODULO,
            kademlia.REPLICAS,
            kademlia.RPC_LIMIT_S,
            client_mode=True,
            record_validator=RecordValidator(RecordGuard(), Counter()),
        )
        made.use(Budget(*limits))
        return made

    return asyncio.run(made())


def records(people: list[Identity], payload: bytes = b"here") -> list[tuple[str, bytes, float]]:
    """A signed record of each, packed as it travels."""
    expires_s = soon_s()
    signed = [(each, sign_record(each, KEY, payload, expires_s)) for each in people]
    return [(each.peer_id, msgpack.packb(data), expires_s) for each, data in signed]


def dictionary(people: list[Identity]) -> bytes:
    """Records as hivemind packs them."""
    made = DictionaryDHTValue()
    for record in records(people):
        made.store(*record)
    packed: bytes = MSGPackSerializer.dumps(made)
    return packed


def nested(levels: int) -> bytes:
    """Tuples in tuples, by hivemind's ext type for them."""
    data = b"\x90"
    for _ in range(levels):
        data = b"\xc9" + len(data).to_bytes(4, "big") + b"\x40" + data
    return data


def odd_values() -> dict[str, bytes]:
    """Values that are no dictionary of records, by what is wrong with them."""
    tuples = msgpack.ExtType(0x40, msgpack.packb([-1, -2]))
    entry = [PEOPLE[0].peer_id, b"", 1.0]

    def packed(items: object) -> bytes:
        return bytes(msgpack.packb(msgpack.ExtType(0x50, msgpack.packb([None, 0.0, items]))))

    return {
        "nested": nested(20),
        "nested within": packed([[PEOPLE[0].peer_id, msgpack.ExtType(0x40, nested(20)), 1.0]]),
        "keys that hash alike": packed([[tuples, b"", 1.0]]),
        "numbers for keys": packed([[(1 << 61) - 1, b"", 1.0]]),
        "too many": packed([entry] * 4097),
        "no entries": packed([[]]),
        "a list of all": bytes(msgpack.packb([None, 0.0, [entry]])),
        "another type": bytes(msgpack.packb(msgpack.ExtType(0x51, b""))),
        "cut off": dictionary(PEOPLE[:1])[:-1],
        "more behind": dictionary(PEOPLE[:1]) + b"\x90",
        "too long": packed([[PEOPLE[0].peer_id, bytes(3 << 20), 1.0]]),
        "empty": b"",
    }


def stored(node: Any) -> set[str]:
    """Whose records a node has under the key."""
    found = node.storage.get(PLACE)
    return set() if found is None else set(found.value.data)


def store(node: Any, *values: tuple[bytes, bytes, float]) -> list[bool]:
    """The node's answer to a request with (subkey, value, expiry) under the key."""
    subkeys, packed, expiries = zip(*values, strict=True)
    request = dht_pb2.StoreRequest(
        keys=[PLACE.to_bytes()] * len(values),
        subkeys=subkeys,
        values=packed,
        expiration_time=expiries,
        in_cache=[False] * len(values),
    )
    return list(asyncio.run(node.rpc_store(request, CONTEXT)).store_ok)


class Answering:
    """A peer that answers every search with the same."""

    def __init__(self, *results: dht_pb2.FindResult) -> None:
        self.answer = dht_pb2.FindResponse(results=results)

    async def rpc_find(self, _: Any, timeout: float) -> dht_pb2.FindResponse:
        del timeout
        return self.answer


def find(node: Any, *results: dht_pb2.FindResult) -> Any:
    """What a search makes of a stranger's answer."""
    node.get_stub = lambda _: Answering(*results)
    return asyncio.run(node.call_find(STRANGER, [PLACE]))


def found(value: bytes, **fields: Any) -> dht_pb2.FindResult:
    return dht_pb2.FindResult(type=dht_pb2.FOUND_DICTIONARY, value=value, **fields)


@pytest.fixture
def _no_stock_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """hivemind's reader fails for whatever it is given."""

    def read(*_: object, **__: object) -> None:
        raise AssertionError("hivemind's reader was given bytes of another peer")

    monkeypatch.setattr(MSGPackSerializer, "loads", read)
    monkeypatch.setattr(msgpack, "loads", read)
    monkeypatch.setattr(msgpack, "unpackb", read)


@pytest.mark.usefixtures("_no_stock_reader")
def test_nothing_of_others_goes_through_hivemind_s_reader() -> None:
    from hivemind.dht.node import _SearchState

    node, packed = protocol(), dictionary(PEOPLE[:3])
    names = {each.peer_id for each in PEOPLE[:3]}
    author, value, expires_s = records(PEOPLE[3:4])[0]
    assert store(node, (b"", packed, 0.0), (msgpack.packb(author), value, expires_s)) == [True] * 2
    assert stored(node) == names | {author}
    # As it is passed on to a third peer, which reads it and gives it to its own caller.
    request = dht_pb2.FindRequest(keys=[PLACE.to_bytes()])
    passed_on = asyncio.run(node.rpc_find(request, CONTEXT)).results[0]
    reader = protocol()
    ((told, _),) = find(reader, passed_on).values()
    assert set(told.value.data) == names | {author}

    async def searched() -> Any:
        state = _SearchState(
            PLACE, 0.0, serializer=reader.serializer, record_validator=reader.record_validator
        )
        state.add_candidate(told, None)
        return (await state.future).value

    assert set(asyncio.run(searched())) == names | {author}
    for value in odd_values().values():
        assert store(node, (b"", value, soon_s())) == [False]
        assert store(node, (msgpack.packb(author), value, soon_s())) == [False]
        assert store(node, (value, packed, soon_s())) in ([False], [True] * (value == b""))
        ((told, _),) = find(reader, found(value)).values()
        assert told is None


@pytest.mark.parametrize("why", odd_values())
def test_another_shape_is_refused_by_who_stores_and_by_who_asks(why: str) -> None:
    node, value = protocol(), odd_values()[why]
    assert store(node, (b"", value, soon_s())) == [False]
    assert not stored(node)
    ((told, _),) = find(node, found(value, expiration_time=soon_s())).values()
    assert told is None
    assert node.record_validator.rejected == {"MalformedError": 2}


def test_each_entry_of_a_dictionary_is_a_store() -> None:
    node = protocol(RateLimit(name="dht_stores", unit="", per_s=0, burst=10))
    assert store(node, (b"", dictionary(PEOPLE[:8]), 0.0)) == [True]
    assert store(node, (b"", dictionary(PEOPLE[8:16]), 0.0)) == [True]
    assert len(stored(node)) == 10, "as many as are left"
    assert store(node, (b"", dictionary(PEOPLE[16:18]), 0.0)) == [False]


def test_entries_of_dictionaries_count_for_all_peers_together() -> None:
    limit = RateLimit(name="dht_bulk_stores", unit="", all_per_s=0, all_burst=5)
    node = protocol(limit)
    store(node, (b"", dictionary(PEOPLE[:8]), 0.0))
    assert len(stored(node)) == 5
    author, value, expires_s = records(PEOPLE[9:10])[0]
    assert store(node, (msgpack.packb(author), value, expires_s)) == [True], "its own goes on"


def test_bytes_are_charged_before_they_are_read() -> None:
    rate = RateLimit(name=DHT_STORE_BYTES.name, unit="", per_s=0, burst=1000)
    node = protocol(rate)
    assert store(node, (b"", dictionary(PEOPLE[:8]), 0.0)) == [False]
    assert store(node, (b"", bytes(2000), 0.0)) == [False]
    assert not node.record_validator.rejected, "nobody looked"
    reader = protocol(RateLimit(name=DHT_FOUND_BYTES.name, unit="", per_s=0, burst=3000))
    answers = [find(reader, found(dictionary(PEOPLE[:6])))[PLACE][0] for _ in range(2)]
    assert [each is not None for each in answers] == [True, False]


def test_others_get_the_loop_between_entries() -> None:
    node, turns = protocol(), 0

    async def body() -> None:
        async def count() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        counting = asyncio.create_task(count())
        await node._found_records(PLACE.to_bytes(), dictionary(PEOPLE))
        counting.cancel()

    asyncio.run(body())
    assert turns >= len(PEOPLE) // KEEPING.records_a_turn


@pytest.mark.parametrize(
    "fields",
    [
        {"keys": [b"x"] * 2, "values": [b""], "subkeys": [b""] * 2},
        {"keys": [b"x"] * 2, "values": [b""] * 2, "subkeys": [b""]},
        {"keys": [b"x"] * 2000, "values": [b""] * 2000, "subkeys": [b""] * 2000},
    ],
)
def test_a_request_of_another_shape_is_no_request(fields: dict[str, Any]) -> None:
    count = len(fields["keys"])
    request = dht_pb2.StoreRequest(
        **fields, expiration_time=[0.0] * count, in_cache=[False] * count
    )
    with pytest.raises(MalformedError):
        asyncio.run(protocol().rpc_store(request, CONTEXT))


def test_places_are_those_of_their_peers_and_few() -> None:
    """A place is a number that hashes by its remainder: whoever chose many could have them all
    alike. A peer id of a megabyte takes hours to be written in base 58."""
    peers = [PeerID.from_base58(each.peer_id) for each in PEOPLE]
    right = [(node_id_of(each).to_bytes(), each.to_bytes()) for each in peers]
    alike = [(((n << 61) - n).to_bytes(20, "big"), peers[0].to_bytes()) for n in range(5)]
    odd = [(b"", b""), (bytes(20), bytes(1 << 20)), (bytes(1 << 20), peers[0].to_bytes())]
    for named, wanted in ((right, right[:20]), (alike + odd + right[:2], right[:2])):
        result = dht_pb2.FindResult(
            type=dht_pb2.NOT_FOUND,
            nearest_node_ids=[place for place, _ in named],
            nearest_peer_ids=[raw for _, raw in named],
        )
        ((_, near),) = find(protocol(), result).values()
        assert [(place.to_bytes(), each.to_bytes()) for place, each in near.items()] == wanted


def test_an_answer_to_something_else_is_none() -> None:
    node = protocol()
    assert find(node) is None
    assert find(node, found(b""), found(b"")) is None


def test_who_asks_to_be_called_back_is_called_a_few_times() -> None:
    node, called = protocol(), []

    async def call_ping(peer: Any, validate: bool = False, strict: bool = True) -> Any:
        del validate, strict
        called.append(peer)
        return None

    node.call_ping = call_ping
    info = dht_pb2.NodeInfo(node_id=node_id_of(STRANGER).to_bytes())

    async def ask() -> None:
        for _ in range(50):
            await node.rpc_ping(dht_pb2.PingRequest(peer=info, validate=True), CONTEXT)

    asyncio.run(ask())
    assert 0 < len(called) < 20
    odd = dht_pb2.PingRequest(peer=dht_pb2.NodeInfo(node_id=bytes(1 << 20)))
    with pytest.raises(MalformedError):
        asyncio.run(node.rpc_ping(odd, CONTEXT))


def test_newcomers_are_handed_records_within_their_rate() -> None:
    node = protocol(RateLimit(name="dht_find_bytes", unit="", per_s=0, burst=5000))
    store(node, (b"", dictionary(PEOPLE[:10]), 0.0))
    sent = []

    class Taking:
        async def rpc_store(self, request: Any, timeout: float) -> Any:
            del timeout
            sent.append(request)
            return dht_pb2.StoreResponse(store_ok=[True])

    node.get_stub = lambda _: Taking()
    value = node.storage.get(PLACE).value
    for _ in range(5):
        asyncio.run(node.call_store(STRANGER, [PLACE], [value], [soon_s()]))
    assert len(sent) == 1
