"""Encodes messages for the wire: msgspec over frozen dataclasses in a versioned envelope.

An envelope is the msgpack array ``[version, kind, payload]``. Unknown fields are ignored, unknown
versions and kinds are refused, and types and bounds are checked while decoding. Pickle is never
used. A frame on a stream is ``u32 frame length, u32 envelope length, envelope, body``, where the
body is raw tensor bytes (may be empty); lengths are little-endian and bounded before reading.
"""

import struct
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import msgspec

from dht.errors import PeerError

WIRE_VERSION = 4
"""Peers of different versions cannot talk: a message that gains a required field, loses one, or
means something else has a new version. What is new and may be left out has not, unless it is a
field of an open: stages check the grant's signature over all fields that they know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameBounds:
    """Bounds of what is read and decoded at once."""

    bytes_max: int = 32 << 20
    """Maximum size of a frame; chunks of a prompt are made to fit (:attr:`chunk_bytes`)."""
    envelope_bytes_max: int = 8 << 20
    record_bytes_max: int = 4096
    piece_bytes: int = 256 << 10
    """Bytes of a frame that are read without asking whether there is room for them."""

    @property
    def chunk_bytes(self) -> int:
        """Maximum bytes of a chunk's rows at its first stage. A later stage may send nearly four
        times as many: in float32, and with what a head takes of three layers in front of it."""
        return self.bytes_max // 4


FRAME_BOUNDS = FrameBounds()

SIGNED_BYTES_MAX = FRAME_BOUNDS.record_bytes_max + 1024
"""Maximum signed record: payload, key (at most 512 bytes), peer id, signature and field names."""

T = TypeVar("T")
_LENGTHS = struct.Struct("<II")

_kinds: dict[str, type] = {}
_decoders: dict[str, msgspec.msgpack.Decoder[Any]] = {}
_framed: dict[str, msgspec.msgpack.Decoder[Any]] = {}
"""The decoders of what travels as a frame. Records may be larger in memory than on the wire."""
_names: dict[type, str] = {}


def _plain(value: object) -> object:
    """The Python number of a scalar of numpy or torch, which its ``item`` returns."""
    item = getattr(value, "item", None)
    if callable(item):
        return item()
    raise TypeError(f"{type(value).__name__} does not travel")


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
_envelope = msgspec.msgpack.Decoder(tuple[int, str, msgspec.Raw])


class MalformedError(PeerError):
    """A peer sent bytes that are not a message of this protocol version."""


class OtherVersionError(MalformedError):
    """A peer speaks another version; ``theirs`` is its number."""

    def __init__(self, theirs: int) -> None:
        super().__init__(
            f"wire version {theirs}; this software speaks {WIRE_VERSION}: the older one must be"
            " updated"
        )
        self.theirs = theirs


def register_message(kind: str, cls: type, *, framed: bool = True) -> None:
    """Register the frozen dataclass ``cls`` under its name on the wire. Names are never reused.

    What is not ``framed``, such as a record, is never a message of a stream by itself.
    """
    if _kinds.setdefault(kind, cls) is not cls:
        raise ValueError(f"wire kind {kind!r} already names {_kinds[kind].__name__}")
    _decoders[kind] = msgspec.msgpack.Decoder(cls)
    if framed:
        _framed[kind] = _decoders[kind]
    _names[cls] = kind


def encode(value: object) -> bytes:
    """The envelope bytes of a value of a registered type."""
    return _encoder.encode((WIRE_VERSION, _names[type(value)], value))


def canonical(value: T) -> T:
    """``value``, of a registered type, as its reader will have it.

    A float that was given as a whole number, an integral float in a field of whole numbers or
    numpy's scalars change their type on the way. Who signs the bytes of a value signs those of its
    canonical form, whose encoding is the same on both sides.

    Raises ValueError, with the field's name, for a value that no reader would accept.
    """
    cls = type(value)
    try:
        return msgspec.msgpack.decode(_encoder.encode(value), type=cls, strict=False)
    except (msgspec.MsgspecError, TypeError, OverflowError) as error:
        raise ValueError(f"{_names[cls]} cannot be sent: {error}") from error


def decode(data: bytes | memoryview, *, limit_bytes: int = FRAME_BOUNDS.envelope_bytes_max) -> Any:
    """The value in the envelope ``data``; raises :class:`MalformedError` for anything else."""
    return _decode(data, _decoders, limit_bytes)


def _decode(
    data: bytes | memoryview,
    decoders: dict[str, msgspec.msgpack.Decoder[Any]],
    limit_bytes: int = FRAME_BOUNDS.envelope_bytes_max,
) -> Any:
    if len(data) > limit_bytes:
        raise MalformedError(f"message of {len(data)} bytes; the limit is {limit_bytes}")
    try:
        version, kind, payload = _envelope.decode(data)
        if version != WIRE_VERSION:
            raise OtherVersionError(version)
        decoder = decoders.get(kind)
        if decoder is None:
            raise MalformedError(f"unknown message kind {kind[:32]!r}")
        return decoder.decode(payload)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
        raise MalformedError(f"not a message: {error}") from error
    except RecursionError as error:
        raise MalformedError("not a message: nested too deeply") from error


def decode_as(cls: type[T], data: bytes | memoryview, *, limit_bytes: int) -> T:
    """:func:`decode` for a value that must be of type ``cls``."""
    value = decode(data, limit_bytes=limit_bytes)
    if not isinstance(value, cls):
        raise MalformedError(f"expected {cls.__name__}, got {type(value).__name__}")
    return value


class ByteStream(Protocol):
    """The methods of a stream that framing uses."""

    async def read_exactly(self, count: int) -> bytes: ...

    def write(self, data: bytes) -> None: ...

    async def drain(self) -> None: ...


class FrameRoom(Protocol):
    """Memory for one peer's unfinished frames."""

    def take(self, size_bytes: int) -> None:
        """Take room for some bytes. Raises NetworkError where the peer may have no more."""
        ...

    def give_back(self, size_bytes: int) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One message and the raw tensor bytes that belong to it."""

    message: Any
    body: bytes | memoryview = b""
    size_bytes: int = 0
    """Size of the whole frame as read, including its lengths."""


def encode_frame(message: object, body: bytes | memoryview = b"") -> bytes:
    """The bytes of a whole frame; raises ValueError above ``FRAME_BOUNDS.bytes_max``."""
    envelope = encode(message)
    total = 4 + len(envelope) + len(body)
    if total > FRAME_BOUNDS.bytes_max:
        raise ValueError(f"frame of {total} bytes; the limit is {FRAME_BOUNDS.bytes_max}")
    return b"".join((_LENGTHS.pack(total, len(envelope)), envelope, body))


async def read_frame(
    stream: ByteStream, *, limit_bytes: int = FRAME_BOUNDS.bytes_max, room: FrameRoom | None = None
) -> Frame:
    """Read one frame; allocates at most ``limit_bytes``, from ``room`` while it is unfinished.

    Raises:
        MalformedError: lengths or content break the protocol; the stream must be closed.
        NetworkError: the stream ended, or there is no room for the frame.
    """
    lengths = await stream.read_exactly(_LENGTHS.size)
    total, envelope_bytes = _checked_lengths(lengths, limit_bytes)
    if room is None or total <= FRAME_BOUNDS.piece_bytes:
        data: bytes | bytearray = await stream.read_exactly(total - 4)
    else:
        data = await _read_pieces(stream, total - 4, room)
    return _frame(memoryview(data), envelope_bytes)


async def _read_pieces(stream: ByteStream, count: int, room: FrameRoom) -> bytearray:
    """Read ``count`` bytes; takes room for them as they come, and gives it back at the end."""
    data, taken = bytearray(), 0
    try:
        while len(data) < count:
            size = min(FRAME_BOUNDS.piece_bytes, count - len(data))
            room.take(size)
            taken += size
            data += await stream.read_exactly(size)
    finally:
        room.give_back(taken)
    return data


def decode_frame(data: memoryview) -> Frame:
    """The frame in ``data``, which must hold exactly one; raises MalformedError."""
    if len(data) < _LENGTHS.size:
        raise MalformedError(f"frame of {len(data)} bytes")
    total, envelope_bytes = _checked_lengths(data[: _LENGTHS.size], FRAME_BOUNDS.bytes_max)
    if len(data) != total + 4:
        raise MalformedError(f"frame of {total} bytes in {len(data) - 4}")
    return _frame(data[_LENGTHS.size :], envelope_bytes)


def _checked_lengths(lengths: bytes | memoryview, limit_bytes: int) -> tuple[int, int]:
    total, envelope_bytes = _LENGTHS.unpack(lengths)
    if total > limit_bytes or not 0 < envelope_bytes <= total - 4:
        raise MalformedError(
            f"frame of {total} bytes with an envelope of {envelope_bytes}; the limit is"
            f" {limit_bytes}"
        )
    return total, envelope_bytes


def _frame(data: memoryview, envelope_bytes: int) -> Frame:
    message = _decode(data[:envelope_bytes], _framed)
    size_bytes = _LENGTHS.size + len(data)
    return Frame(message=message, body=data[envelope_bytes:], size_bytes=size_bytes)


async def send_frame(stream: ByteStream, message: object, body: bytes | memoryview = b"") -> None:
    """Write one frame and wait until the transport can take more."""
    stream.write(encode_frame(message, body))
    await stream.drain()
