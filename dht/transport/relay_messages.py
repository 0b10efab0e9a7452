"""Messages of libp2p's circuit relay v2: protobuf after a varint of their length.

A peer asks a relay for a slot (RESERVE), or to be passed on to one that has a slot (CONNECT). The
relay then asks the one that is called (:data:`dht.transport.interface.RELAY_STOP_PROTOCOL`).
Pure but for reading a stream
(https://github.com/libp2p/specs/blob/master/relay/circuit-v2.md).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

from dht.messages import codec
from dht.transport.interface import Stream

ANSWER_BYTES_MAX = 4096
_VARINT_BYTES_MAX = 10
"""Fixed by protobuf: length of the longest varint, of 64 bits."""
_PEER_ID_BYTES_MAX = 64


class HopType(IntEnum):
    """Type of a message to and from a relay."""

    RESERVE = 0
    CONNECT = 1
    STATUS = 2


class StopType(IntEnum):
    """Type of a message to and from the peer that is called."""

    CONNECT = 0
    STATUS = 1


class Status(IntEnum):
    """What a relay, or the peer that is called, answers."""

    OK = 100
    FULL = 201
    DENIED = 202
    FAILED = 203
    """The call failed."""
    NO_SLOT = 204
    """The peer that is called has no slot here."""


class Field(IntEnum):
    """Fields of a message to and from a relay; within a peer or a reservation, its first one."""

    TYPE = 1
    PEER = 2
    RESERVATION = 3
    LIMIT = 4
    STATUS = 5
    STOP_STATUS = 4
    PEER_ID = 1
    EXPIRE = 1


class _Wire(IntEnum):
    """How a field's value is written (protobuf's wire types)."""

    VARINT = 0
    FIXED64 = 1
    BYTES = 2
    FIXED32 = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class HopRequest:
    """What a relay is asked for; ``peer`` are the bytes of the id of the peer to call."""

    kind: int
    peer: bytes = b""


def hop_request(message: bytes) -> HopRequest:
    """The request in a message; raises :class:`dht.messages.codec.MalformedError`."""
    fields = dict(fields_of(message))
    kind, peer = fields.get(Field.TYPE), fields.get(Field.PEER, b"")
    called = dict(fields_of(peer)).get(Field.PEER_ID, b"") if isinstance(peer, bytes) else b""
    if not isinstance(kind, int) or not isinstance(called, bytes):
        raise codec.MalformedError("a relay is asked for nothing")
    if len(called) > _PEER_ID_BYTES_MAX:
        raise codec.MalformedError("a relay is asked for a peer with too long an id")
    return HopRequest(kind=kind, peer=called)


def connect_message(kind: HopType | StopType, peer: bytes) -> bytes:
    """A call, with its length: asked of a relay, to the peer whose id is ``peer``; or passed on to
    the peer called, from that one."""
    return _framed(_number(Field.TYPE, kind) + _bytes(Field.PEER, _bytes(Field.PEER_ID, peer)))


def with_status(kind: int, status: int, slot_until_unix_s: int | None = None) -> bytes:
    """A relay's answer, with its length; ``slot_until_unix_s``: when the slot granted ends."""
    slot = b""
    if slot_until_unix_s is not None:
        slot = _bytes(Field.RESERVATION, _number(Field.EXPIRE, slot_until_unix_s))
    return _framed(_number(Field.TYPE, kind) + slot + _number(Field.STATUS, status))


def status_of(message: bytes) -> int:
    """The status with which a peer takes a call; raises as :func:`hop_request`."""
    fields = dict(fields_of(message))
    status = fields.get(Field.STOP_STATUS)
    if fields.get(Field.TYPE) != StopType.STATUS or not isinstance(status, int):
        raise codec.MalformedError("a call is answered without a status")
    return status


async def read_message(stream: Stream) -> bytes:
    """The next message, without its length. Raises NetworkError where the stream ends, and
    :class:`dht.messages.codec.MalformedError` for one that is too long."""
    length = shift = 0
    while True:
        byte = (await stream.read_exactly(1))[0]
        length |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
        if length > ANSWER_BYTES_MAX or shift > 14:
            raise codec.MalformedError("a relay's message is too long")
    if length > ANSWER_BYTES_MAX:
        raise codec.MalformedError(
            f"a relay's message of {length} bytes, {ANSWER_BYTES_MAX} at most"
        )
    return await stream.read_exactly(length)


def fields_of(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Protobuf fields as pairs of number and value: varints and bytes; other types are skipped."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        kind = tag & 7
        if kind == _Wire.VARINT:
            value, at = _varint(message, at)
            yield tag >> 3, value
        elif kind == _Wire.BYTES:
            length, at = _varint(message, at)
            yield tag >> 3, message[at : at + length]
            at += length
        elif kind in {_Wire.FIXED32, _Wire.FIXED64}:
            at += 4 if kind == _Wire.FIXED32 else 8
        else:
            raise codec.MalformedError(f"a relay's message has a field of type {kind}")
    if at > len(message):
        raise codec.MalformedError("a relay's message ends within a field")


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift, byte in enumerate(message[at : at + _VARINT_BYTES_MAX]):
        value |= (byte & 0x7F) << (7 * shift)
        if byte < 0x80:
            return value, at + shift + 1
    raise codec.MalformedError("a relay's message holds a number without an end")


def _number(field: int, value: int) -> bytes:
    return _encoded(field << 3 | _Wire.VARINT) + _encoded(value)


def _bytes(field: int, value: bytes) -> bytes:
    return _encoded(field << 3 | _Wire.BYTES) + _encoded(len(value)) + value


def _framed(message: bytes) -> bytes:
    return _encoded(len(message)) + message


def _encoded(value: int) -> bytes:
    """A varint."""
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])
