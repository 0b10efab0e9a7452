"""Reserves slots at relays for a peer behind NAT, by libp2p's circuit relay v2.

A peer with a reservation keeps its connection to the relay, which then passes on the calls of peers
that dial ``<relay>/p2p-circuit/p2p/<peer>``. The daemon accepts these calls; for light peers
:mod:`dht.light.relay` does. The relay sees ciphertext: both ends secure the connection through it
once more.
"""

from dataclasses import dataclass

from dht.errors import NetworkError
from dht.identity.multiaddr import CIRCUIT, dialled_of, is_loopback
from dht.messages import codec
from dht.messages.types import RECORD_BOUNDS
from dht.transport.interface import RELAY_PROTOCOL, Transport
from dht.transport.relay_messages import Field, HopType, Status, fields_of, read_message

RESERVE = b"\x02\x08\x00"
"""A request, behind its length of two bytes: field 1, the type, is 0 (reserve)."""
PER_RELAY = 2
"""Maximum addresses of one relay that are announced."""
CALL_S_MIN, CALL_BYTES_MIN = 600, 1 << 30
"""Minimum limits of a useful relay on a call; libp2p's own limits are 2 min and 128 KiB."""
_DURATION_S, _DATA_BYTES = 1, 2
"""Fixed by libp2p's circuit relay v2: numbers of these fields of a limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Granted:
    """A relay's answer; ``status`` is 100 when it grants the reservation."""

    status: int
    call_s: int = 0
    """Time after which the relay ends a call; 0: never."""
    call_bytes: int = 0
    """Bytes in one direction after which the relay ends a call; 0: never."""

    @property
    def is_enough(self) -> bool:
        """Whether the relay's limits let a call live long enough to serve through it."""
        return not (0 < self.call_s < CALL_S_MIN or 0 < self.call_bytes < CALL_BYTES_MIN)


async def reserve(transport: Transport, relay_id: str, addresses: tuple[str, ...]) -> None:
    """Reserve a slot at a relay, or renew it.

    Raises NetworkError when the relay cannot be reached, refuses, or has too low limits, and
    :class:`dht.messages.codec.MalformedError` for a malformed answer. The caller sets the time
    limit.
    """
    granted = await ask_slot(transport, relay_id, addresses)
    if granted.status != Status.OK:
        raise NetworkError(f"relay {relay_id} refuses a reservation: status {granted.status}")
    if not granted.is_enough:
        raise NetworkError(
            f"relay {relay_id} ends calls after {granted.call_s} s or {granted.call_bytes} bytes"
        )


async def ask_slot(transport: Transport, relay_id: str, addresses: tuple[str, ...] = ()) -> Granted:
    """What a relay answers to who asks for a slot; raises as :func:`reserve`, but for refusals."""
    stream = await transport.open_stream(relay_id, RELAY_PROTOCOL, addresses=addresses)
    try:
        stream.write(RESERVE)
        await stream.drain()
        return granted_by(await read_message(stream))
    finally:
        await stream.close()


def granted_by(message: bytes) -> Granted:
    """Parse a relay's answer.

    Raises :class:`dht.messages.codec.MalformedError` for anything but a status.
    """
    fields = dict(fields_of(message))
    status, limit = fields.get(Field.STATUS), fields.get(Field.LIMIT, b"")
    if fields.get(Field.TYPE) != HopType.STATUS or not isinstance(status, int):
        raise codec.MalformedError("a relay answers without a status")
    limits = dict(fields_of(limit)) if isinstance(limit, bytes) else {}
    call_s, call_bytes = limits.get(_DURATION_S, 0), limits.get(_DATA_BYTES, 0)
    if not isinstance(call_s, int) or not isinstance(call_bytes, int):
        raise codec.MalformedError("a relay's limits are no numbers")
    return Granted(status=status, call_s=call_s, call_bytes=call_bytes)


def circuit_addresses(relay_id: str, addresses: tuple[str, ...], peer_id: str) -> tuple[str, ...]:
    """Addresses at which others dial ``peer_id`` through the relay with ``addresses``."""
    dialled = [each for each in dialled_of(relay_id, addresses) if not is_loopback(each)]
    return tuple(f"{each}/p2p/{relay_id}{CIRCUIT}/p2p/{peer_id}" for each in dialled[:PER_RELAY])


def with_circuits(own: tuple[str, ...], circuits: tuple[str, ...]) -> tuple[str, ...]:
    """The addresses to announce, ``RECORD_BOUNDS.addresses_max`` at most; those through relays
    always fit."""
    circuits = circuits[: RECORD_BOUNDS.addresses_max]
    return (*own[: RECORD_BOUNDS.addresses_max - len(circuits)], *circuits)
