"""Circuit relay v2 of libp2p, as far as a peer behind NAT needs it: reserve a slot at a relay.

Who holds a reservation keeps its connection to the relay, which then passes on those who dial
``<relay>/p2p-circuit/p2p/<peer>``; the daemon takes them. The relay sees ciphertext: both ends
secure the connection through it once more. Messages are protobuf behind a varint of their length
(the circuit relay v2 specification of libp2p). Pure but for the stream.
"""

from collections.abc import Iterator

from dht import wire
from dht.addresses import dialled_of, is_loopback
from dht.errors import NetworkError
from dht.transport import Stream, Transport
from dht.types import ADDRESSES_MAX

RELAY_PROTOCOL = "/libp2p/circuit/relay/0.2.0/hop"
CIRCUIT = "/p2p-circuit"
RESERVE = b"\x02\x08\x00"
"""A message of two bytes: field 1, the type, is 0 (reserve)."""
ANSWER_BYTES_MAX = 4096
PER_RELAY = 2
"""Addresses of one relay that are told on."""
_TYPE, _STATUS = 1, 5
_IS_STATUS, _OK = 2, 100
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_VARINT_BYTES_MAX = 10


async def reserve(transport: Transport, relay_id: str, addresses: tuple[str, ...]) -> None:
    """Reserve a slot at a relay, or renew it.

    Raises NetworkError when the relay cannot be reached or refuses, and
    :class:`dht.wire.MalformedError` when its answer is none. The caller sets the time limit.
    """
    stream = await transport.open_stream(relay_id, RELAY_PROTOCOL, addresses=addresses)
    try:
        stream.write(RESERVE)
        await stream.drain()
        status = status_of(await _read_message(stream))
    finally:
        await stream.close()
    if status != _OK:
        raise NetworkError(f"relay {relay_id} refuses a reservation: status {status}")


def status_of(message: bytes) -> int:
    """The status that a relay answers with, 100 when it grants what was asked.

    Raises :class:`dht.wire.MalformedError` for anything but a status.
    """
    kind = status = None
    for number, value in _fields(message):
        kind = value if number == _TYPE else kind
        status = value if number == _STATUS else status
    if kind != _IS_STATUS or status is None:
        raise wire.MalformedError("a relay answers without a status")
    return status


def circuit_addresses(relay_id: str, addresses: tuple[str, ...], peer_id: str) -> tuple[str, ...]:
    """Where others dial ``peer_id`` through a relay with these full addresses of its own."""
    dialled = [each for each in dialled_of(relay_id, addresses) if not is_loopback(each)]
    return tuple(f"{each}/p2p/{relay_id}{CIRCUIT}/p2p/{peer_id}" for each in dialled[:PER_RELAY])


def with_circuits(own: tuple[str, ...], circuits: tuple[str, ...]) -> tuple[str, ...]:
    """The addresses to announce: a peer's own, and those through relays, which always fit."""
    circuits = circuits[:ADDRESSES_MAX]
    return (*own[: ADDRESSES_MAX - len(circuits)], *circuits)


async def _read_message(stream: Stream) -> bytes:
    length = shift = 0
    while True:
        byte = (await stream.read_exactly(1))[0]
        length |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
        if length > ANSWER_BYTES_MAX or shift > 14:
            raise wire.MalformedError("a relay's answer is too long")
    if length > ANSWER_BYTES_MAX:
        raise wire.MalformedError(f"a relay answers {length} bytes, {ANSWER_BYTES_MAX} at most")
    return await stream.read_exactly(length)


def _fields(message: bytes) -> Iterator[tuple[int, int]]:
    """Field numbers with their values where those are numbers; everything else is skipped."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        kind = tag & 7
        if kind == _VARINT:
            value, at = _varint(message, at)
            yield tag >> 3, value
        elif kind == _BYTES:
            length, at = _varint(message, at)
            at += length
        elif kind in {_FIXED32, _FIXED64}:
            at += 4 if kind == _FIXED32 else 8
        else:
            raise wire.MalformedError(f"a relay's answer has a field of type {kind}")
    if at > len(message):
        raise wire.MalformedError("a relay's answer ends within a field")


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift, byte in enumerate(message[at : at + _VARINT_BYTES_MAX]):
        value |= (byte & 0x7F) << (7 * shift)
        if byte < 0x80:
            return value, at + shift + 1
    raise wire.MalformedError("a relay's answer holds a number without an end")
