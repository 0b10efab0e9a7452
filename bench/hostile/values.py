"""Attacks by bytes that a library reads: values of the DHT, answers to searches, first lines."""

import asyncio
import contextlib
import itertools
import os
from functools import partial
from typing import Any

import msgpack

from bench.hostile.attacker import Sent, Target
from bench.hostile.strangers import made_up, whatever_hivemind_raises
from dht.identity.multiaddr import split

NEST_LEVELS = 300
ALIKE_ENTRIES, ALIKE_BITS = 20_000, 17
DICTIONARY_RECORDS = 4096
PAUSE_S = 0.05
SILENT_CONNECTIONS, LONG_LINES = 200, 12
LINE_BYTES = b"\xff\xff\xff\xff\x07"
"""A line's length as a varint: nearly 2 GiB."""


def ext(code: int, data: bytes) -> bytes:
    return bytes(msgpack.packb(msgpack.ExtType(code, data)))


def nested(levels: int = NEST_LEVELS) -> bytes:
    """Tuples within each other, as hivemind packs them."""
    data = b"\x90"
    for _ in range(levels):
        data = b"\xc9" + len(data).to_bytes(4, "big") + b"\x40" + data
    return data


def alike(count: int = ALIKE_ENTRIES) -> bytes:
    """A dictionary whose keys are tuples of -1 and -2, which hash alike."""
    head = b"\xc7" + bytes((ALIKE_BITS + 3,)) + b"\x40\xdc" + ALIKE_BITS.to_bytes(2, "big")
    keys = itertools.product((b"\xff", b"\xfe"), repeat=ALIKE_BITS)
    entries = b"".join(
        b"\x93" + head + b"".join(key) + b"\xc0\x00" for key in itertools.islice(keys, count)
    )
    return ext(0x50, b"\x93\xc0\x00\xdd" + count.to_bytes(4, "big") + entries)


async def store_whole(target: Target, transport: Any, peer_id: str, key: str, value: bytes) -> None:
    """Ask a peer to store ``value`` as all records under a key."""
    from hivemind.dht.routing import DHTID
    from hivemind.p2p import PeerID
    from hivemind.proto import dht_pb2

    protocol = transport._node.protocol
    request = dht_pb2.StoreRequest(
        keys=[DHTID.generate(source=key).to_bytes()],
        subkeys=[b""],
        values=[value],
        expiration_time=[transport.now() + 60],
        in_cache=[False],
        peer=protocol.node_info,
    )
    target.sent.frames += 1
    target.sent.bytes += request.ByteSize()
    with whatever_hivemind_raises():
        answer = await protocol.get_stub(PeerID.from_base58(peer_id)).rpc_store(request, timeout=10)
        target.sent.refused["not stored"] += not any(answer.store_ok)


async def nested_values(target: Target) -> Sent:
    """Values of the DHT that nest without end or whose keys hash alike, to be stored."""
    transport = await target.enter(serves=True)
    key, values = f"hostile/{transport.peer_id}/nodes", itertools.cycle((nested(), alike()))

    async def send(peer_id: str) -> None:
        await store_whole(target, transport, peer_id, key, next(values))

    return await target.at_once([partial(send, peer) for peer in target.ids], PAUSE_S)


async def thousands_in_one(target: Target) -> Sent:
    """Dictionaries of thousands of records, each of an author who is nobody but signs properly."""
    transport = await target.enter(serves=True)
    key, expires_s = f"hostile/{transport.peer_id}/nodes", transport.now() + 90
    made = await asyncio.to_thread(made_up, key, expires_s, DICTIONARY_RECORDS, lambda _: b"x")
    items = [[author, msgpack.packb(signed), until_s] for author, signed, until_s in made]
    value = ext(0x50, msgpack.packb([None, expires_s, items]))
    target.sent.records += len(items)

    async def send(peer_id: str) -> None:
        await store_whole(target, transport, peer_id, key, value)

    return await target.at_once([partial(send, peer) for peer in target.ids], PAUSE_S)


async def odd_answers(target: Target) -> Sent:
    """A node of the DHT that answers searches with nested values, with neighbours whose places
    hash alike, and with peer ids of a megabyte."""
    from hivemind.p2p import P2PContext
    from hivemind.proto import dht_pb2

    from dht.daemon import kademlia

    peer, long = os.urandom(38), os.urandom(1 << 20)
    places = [(number * ((1 << 61) - 1)).to_bytes(20, "big") for number in range(20_000)]
    results = itertools.cycle(
        (
            dht_pb2.FindResult(type=dht_pb2.FOUND_DICTIONARY, value=nested(), expiration_time=2e9),
            dht_pb2.FindResult(type=dht_pb2.FOUND_DICTIONARY, value=alike(), expiration_time=2e9),
            dht_pb2.FindResult(nearest_node_ids=places, nearest_peer_ids=[peer] * len(places)),
            dht_pb2.FindResult(nearest_node_ids=[bytes(20)], nearest_peer_ids=[long]),
        )
    )

    async def rpc_find(
        self: Any, request: dht_pb2.FindRequest, context: P2PContext
    ) -> dht_pb2.FindResponse:
        del context
        target.sent.came += 1
        found = [next(results) for _ in request.keys]
        return dht_pb2.FindResponse(results=found, peer=self.node_info)

    kademlia.RecordProtocol.rpc_find = rpc_find  # this process is the attacker's alone
    transport: Any = await target.enter(serves=True)

    async def be_known() -> None:
        for peer_id in target.ids:
            target.sent.frames += 1
            with whatever_hivemind_raises():
                await kademlia.greet(transport._node, peer_id)

    return await target.at_once([be_known], 1.0)


async def first_lines(target: Target) -> Sent:
    """TCP connections that show nobody's identity: first lines without end, and silence."""
    ports = [
        (parts[2], int(parts[4]))
        for parts in (split(address)[1].split("/") for address in target.peers)
    ]

    async def connect(at: tuple[str, int], line: bytes) -> None:
        target.sent.streams += 1
        reader, writer = await asyncio.open_connection(*at)
        try:
            writer.write(line)
            while line:
                target.sent.bytes += 1 << 18
                writer.write(bytes(1 << 18))
                await writer.drain()
            while await reader.read(1 << 10):
                pass
            target.sent.refused["closed"] += 1
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    steps = [partial(connect, at, LINE_BYTES) for at in ports for _ in range(LONG_LINES)]
    steps += [partial(connect, at, b"") for at in ports for _ in range(SILENT_CONNECTIONS)]
    return await target.at_once(steps, PAUSE_S)
