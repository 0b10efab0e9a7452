"""Messages between peers that belong to no session: probes, plans, records, reach.

See docs/protocol.md.
"""

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from dht.messages import codec
from dht.messages.session import Reason
from dht.messages.types import PEERS_MAX, PeerId, Seconds, ShortText

REQUESTS_MAX = 64
"""Requests that one stream of the plan protocol may make."""

KNOWN_BYTES = 8
KEYS_ASKED_MAX = 16
"""Keys that one request for records may name: four kinds of records of four models."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeRequest:
    """Ask the other side to send ``size_bytes`` at once; the asker times their arrival."""

    size_bytes: Annotated[int, Meta(ge=0, le=8 << 20)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeData:
    """The answer to a :class:`ProbeRequest`; its bytes are the frame's body."""

    size_bytes: Annotated[int, Meta(ge=0, le=8 << 20)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    sha256: Annotated[str, Meta(min_length=64, max_length=64)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanBody:
    """The body of a plan as the frame's body; empty when this peer does not have it."""

    sha256: Annotated[str, Meta(min_length=64, max_length=64)]


@dataclass(frozen=True, slots=True, kw_only=True)
class WitnessRequest:
    """Does this peer answer your pings? Only about a peer that the other one pings anyway."""

    peer_id: PeerId


@dataclass(frozen=True, slots=True, kw_only=True)
class Witness:
    """The answer; ``answers`` is None when the peer is not watched here, or just became silent."""

    peer_id: PeerId
    answers: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedRecord:
    """A DHT value: ``payload`` is the envelope of a record, signed by ``peer_id``'s key.

    The signature covers ``key``, ``expires_unix_s`` and ``payload``; see :mod:`dht.records.signed`.
    """

    key: Annotated[str, Meta(max_length=512)]
    peer_id: PeerId
    expires_unix_s: Seconds
    payload: Annotated[bytes, Meta(max_length=codec.RECORD_BYTES_MAX)]
    signature: Annotated[bytes, Meta(min_length=64, max_length=64)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordsRequest:
    """Any peer to a full peer: the living records under ``keys``.

    A full peer that follows a key answers from what it knows; else it reads the DHT for the asker.
    """

    keys: Annotated[
        tuple[Annotated[str, Meta(max_length=512)], ...],
        Meta(min_length=1, max_length=KEYS_ASKED_MAX),
    ]
    known: Annotated[bytes, Meta(max_length=KNOWN_BYTES * 2 * PEERS_MAX)] = b""
    """The first ``KNOWN_BYTES`` of the signatures of records that the asker has: left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordsFound:
    """The answer: values as they lie in the DHT, for the asker to check."""

    records: Annotated[
        tuple[Annotated[bytes, Meta(max_length=codec.SIGNED_BYTES_MAX)], ...],
        Meta(max_length=PEERS_MAX),
    ]
    more: bool
    """There are more than fit into this answer: ask again, with these as known."""
    unix_s: Seconds
    """The full peer's clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordStore:
    """Any peer to a full peer: take this record, signed by the sender itself."""

    record: Annotated[bytes, Meta(max_length=codec.SIGNED_BYTES_MAX)]
    replicate: bool = True
    """Store it in the DHT for the sender, as light peers need; else only know it, and say so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordStored:
    """The answer: whether it, or any replica, took the record, and if not, perhaps why."""

    taken: bool
    reason: Reason = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordsBusy:
    """The answer to a peer that asks more than its share."""

    retry_after_s: Annotated[float, Meta(ge=0.0, le=3600.0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReachRequest:
    """Dial me back, where you see me come from, at this port of mine."""

    port: Annotated[int, Meta(ge=1, le=65_535)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReachAnswer:
    """Whether libp2p answered there; None where this peer cannot say or will not look."""

    reached: bool | None
    host: ShortText = ""
    """The address that was dialled: how the asker looks from here."""


for _kind, _cls in {
    "signed": SignedRecord,
    "probe-request": ProbeRequest,
    "probe-data": ProbeData,
    "plan-request": PlanRequest,
    "plan-body": PlanBody,
    "witness-request": WitnessRequest,
    "witness": Witness,
    "records-request": RecordsRequest,
    "records-found": RecordsFound,
    "record-store": RecordStore,
    "record-stored": RecordStored,
    "records-busy": RecordsBusy,
    "reach-request": ReachRequest,
    "reach-answer": ReachAnswer,
}.items():
    codec.register_message(_kind, _cls)
