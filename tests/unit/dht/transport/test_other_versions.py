"""Peers of two versions: neither counts the other, and both are told."""

import asyncio
import dataclasses
import logging
import random
from hashlib import sha256

import msgspec
import pytest

from dht.errors import NetworkError
from dht.identity.peer_id import Identity
from dht.messages import codec, kv, peer, session
from dht.messages.session import Ping
from dht.records.client import RecordClient
from dht.records.signed import RecordError, RecordGuard, sign_record
from dht.transport.interface import Stream
from dht.transport.other_versions import OtherVersions
from dht.transport.streams import StreamHandlers, stream_pair
from testing.clock import run_virtual

ALICE = Identity(b"a" * 32)
NOW_S = 1_700_000_000.0
KEY = "net/model/nodes"
OTHERS = (codec.WIRE_VERSION - 1, codec.WIRE_VERSION + 1)


def in_version(frame: bytes, version: int) -> bytes:
    """A frame as software of ``version`` sends it. The version is the second byte of envelopes."""
    return frame[:9] + bytes([version]) + frame[10:]


@pytest.mark.parametrize("version", OTHERS)
def test_who_asks_in_another_version_is_told_which_one_is_spoken(
    version: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def serve(stream: Stream) -> None:
        await codec.read_frame(stream)

    async def scenario() -> None:
        handlers = StreamHandlers()
        for _ in range(3):
            near, far = stream_pair("us", "them")
            near.write(in_version(codec.encode_frame(Ping(nonce=1)), version))
            handling = asyncio.create_task(handlers.run(serve, far))
            lengths = await near.read_exactly(8)
            answer = await near.read_exactly(int.from_bytes(lengths[:4], "little") - 4)
            spoken, _, _ = msgspec.msgpack.decode(answer)
            assert spoken == codec.WIRE_VERSION
            await near.close()
            await handling

    run_virtual(scenario(), limit_s=60)
    (told,) = (each for each in caplog.records if each.levelno >= logging.WARNING)
    assert f"wire version {version}, this software {codec.WIRE_VERSION}" in told.getMessage()


@pytest.mark.virtual(limit_s=60)
@pytest.mark.parametrize("version", OTHERS)
async def test_who_asks_is_told_in_which_version_it_was_answered(version: int) -> None:
    async def opened(peer_id: str, protocol: str, where: tuple[str, ...]) -> Stream:
        near, far = stream_pair("us", peer_id)
        far.write(in_version(codec.encode_frame(Ping(nonce=1)), version))
        return near

    client = RecordClient(opened, lambda: NOW_S, {"them": ()}, random.Random(0))
    with pytest.raises(NetworkError, match=f"wire version {version}; .* updated"):
        await client.greet()
    assert client.speak_otherwise == {"them"}


@pytest.mark.parametrize("version", OTHERS)
def test_a_record_of_another_version_counts_for_nothing_and_is_told(version: int) -> None:
    met: list[tuple[str, int]] = []
    guard = RecordGuard(on_other_version=lambda peer_id, version: met.append((peer_id, version)))
    data = sign_record(ALICE, KEY, b"serving", NOW_S + 60)
    with pytest.raises(RecordError, match=f"wire version {version}"):
        guard.admit(data[:1] + bytes([version]) + data[2:], now_unix_s=NOW_S, storer=ALICE.peer_id)
    assert not guard.living(KEY, NOW_S)
    assert met == [(ALICE.peer_id, version)]


def test_strangers_cannot_fill_the_log_with_versions(caplog: pytest.LogCaptureFixture) -> None:
    versions = OtherVersions()
    for number in range(1000):
        versions.note(f"stranger {number}", number)
    assert len(caplog.records) == OtherVersions.told_max


SCHEMAS = {4: "4ef7e8108547332a"}
"""What messages of each version must have, hashed. If this test is red, peers of before would not
understand a message, or would be misunderstood: give ``WIRE_VERSION`` a new number, and add it."""


def schema() -> str:
    """The kinds of messages, and the names of fields that may not be left out."""
    assert all((kv, peer, session)), "they register their messages"
    required = {
        kind: [
            field.name
            for field in dataclasses.fields(cls)
            if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        ]
        for kind, cls in sorted(codec._kinds.items())
        if dataclasses.is_dataclass(cls)
    }
    return sha256(repr(required).encode()).hexdigest()[:16]


def test_what_a_message_must_have_changes_with_the_version_alone() -> None:
    assert SCHEMAS[codec.WIRE_VERSION] == schema()
