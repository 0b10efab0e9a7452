"""Messages between peers outside sessions: probes, plans, records, reach.

See docs/protocol.md.
"""

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from dht.messages import codec
from dht.messages.session import Reason
from dht.messages.types import RECORD_BOUNDS, LayerIndex, PeerId, Seconds, ShortText


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerBounds:
    """Bounds of what peers ask each other beside sessions."""

    requests_max: int = 64
    """Maximum requests on one stream of the plan protocol."""
    texts_max: int = 16
    """Maximum text files of a model: more than have a name now."""
    text_bytes_max: int = 64 << 20
    """Maximum size of one of them; the largest tokenizers have 33 MB."""
    text_piece_bytes: int = 256 << 10
    probe_bytes_max: int = 8 << 20
    """Maximum bytes that one stream of probes may ask for; the budget bounds those of all."""
    keys_asked_max: int = 16
    """Maximum keys in one request for records: four kinds of records of four models."""


PEER_BOUNDS = PeerBounds()

NONCE_BYTES = 16
"""Fixed by the wire: length of a nonce."""
KNOWN_BYTES = 8
"""Fixed by the wire: length of what stands for a known record."""
Sequence = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeRequest:
    """Asks the other side to send ``size_bytes`` at once; the asker times their arrival."""

    size_bytes: Annotated[int, Meta(ge=0, le=PEER_BOUNDS.probe_bytes_max)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeData:
    """The answer to a :class:`ProbeRequest`; the frame's body holds the bytes."""

    size_bytes: Annotated[int, Meta(ge=0, le=PEER_BOUNDS.probe_bytes_max)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    sha256: Annotated[str, Meta(min_length=64, max_length=64)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanBody:
    """The answer to a :class:`PlanRequest`; the frame's body is the plan, or empty if unknown."""

    sha256: Annotated[str, Meta(min_length=64, max_length=64)]


@dataclass(frozen=True, slots=True, kw_only=True)
class WitnessRequest:
    """Asks whether ``peer_id`` answers the other side's pings; nothing is pinged for it."""

    peer_id: PeerId


@dataclass(frozen=True, slots=True, kw_only=True)
class Witness:
    """The answer to a :class:`WitnessRequest`.

    ``answers`` is None when the peer is not watched here, or failed only a few times so far.
    """

    peer_id: PeerId
    answers: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedRecord:
    """A DHT value: ``payload`` is the envelope of a record, signed by ``peer_id``'s key.

    The signature covers all other fields; see :mod:`dht.records.signed`. Of two records of one peer
    under one key, the one with the larger ``sequence`` is the newer, whatever their expiries.
    """

    key: Annotated[str, Meta(max_length=512)]
    peer_id: PeerId
    expires_unix_s: Seconds
    payload: Annotated[bytes, Meta(max_length=codec.FRAME_BOUNDS.record_bytes_max)]
    signature: Annotated[bytes, Meta(min_length=64, max_length=64)]
    sequence: Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordsRequest:
    """Any peer to a full peer: send the living records under ``keys``.

    A full peer that follows a key answers from its replica; otherwise it reads the DHT for the
    asker.
    """

    keys: Annotated[
        tuple[Annotated[str, Meta(max_length=512)], ...],
        Meta(min_length=1, max_length=PEER_BOUNDS.keys_asked_max),
    ]
    known: Annotated[bytes, Meta(max_length=KNOWN_BYTES * 2 * RECORD_BOUNDS.peers_max)] = b""
    """The first ``KNOWN_BYTES`` of the signatures of records to leave out: the asker has them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordsFound:
    """The answer to a :class:`RecordsRequest`: signed values of the DHT, for the asker to check."""

    records: Annotated[
        tuple[Annotated[bytes, Meta(max_length=codec.SIGNED_BYTES_MAX)], ...],
        Meta(max_length=RECORD_BOUNDS.peers_max),
    ]
    more: bool
    """Whether there are more than fit into this answer: ask again, with these as known."""
    unix_s: Seconds
    """The full peer's clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordStore:
    """Any peer to a full peer: take this record, which the sender itself signed."""

    record: Annotated[bytes, Meta(max_length=codec.SIGNED_BYTES_MAX)]
    replicate: bool = True
    """Whether to store it in the DHT, as light peers need, or only to add it to the replica."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordStored:
    """The answer to a :class:`RecordStore`: whether this peer or another took the record.

    If not, ``reason`` may say why.
    """

    taken: bool
    reason: Reason = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordsBusy:
    """The answer to a peer that exceeds its rate limit."""

    retry_after_s: Annotated[float, Meta(ge=0.0, le=3600.0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReachRequest:
    """Asks to be dialled back, at the address that the other side sees and at ``port``."""

    port: Annotated[int, Meta(ge=1, le=65_535)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReachAnswer:
    """Whether libp2p answered there; None if this peer cannot tell or does not dial."""

    reached: bool | None
    host: ShortText = ""
    """The address that was dialled: the asker's as seen from here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCheck:
    """Asks for what layers ``[start, end)`` make of rows that ``nonce`` and the peer asked give.

    See :mod:`node.stage.layer_check`.
    """

    nonce: Annotated[bytes, Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
    start: LayerIndex
    end: LayerIndex


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRows:
    """The answer to a :class:`LayerCheck`: the frame's body holds the rows in float32.

    It is empty where the peer does not hold the layers, or has no time or room to run them.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherVersion:
    """The answer to a message of another version: its envelope says which version is spoken here,
    as that of every message does."""


Digest = Annotated[str, Meta(min_length=64, max_length=64)]


@dataclass(frozen=True, slots=True, kw_only=True)
class TextsRequest:
    """Asks which text files the model of this root has."""

    root: Digest


@dataclass(frozen=True, slots=True, kw_only=True)
class TextFile:
    """One of a model's text files, as :func:`dht.checkpoints.text_files.text_bytes` gives it."""

    name: Annotated[str, Meta(min_length=1, max_length=64)]
    size_bytes: Annotated[int, Meta(ge=0, le=PEER_BOUNDS.text_bytes_max)]
    sha256: Digest


@dataclass(frozen=True, slots=True, kw_only=True)
class TextsFound:
    """The answer to a :class:`TextsRequest`: the files, and the digest of the model's weights.

    Together they have the model's root (:func:`dht.checkpoints.model_files.root_of`). Without files
    the root is not known here.
    """

    files: Annotated[tuple[TextFile, ...], Meta(max_length=PEER_BOUNDS.texts_max)]
    weights: Annotated[str, Meta(max_length=64)] = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRequest:
    """Asks for the piece of a text file that begins at ``start``."""

    sha256: Digest
    start: Annotated[int, Meta(ge=0, le=PEER_BOUNDS.text_bytes_max)]


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPiece:
    """The answer to a :class:`TextRequest`: the frame's body has ``PEER_BOUNDS.text_piece_bytes``,
    or what is left."""

    start: Annotated[int, Meta(ge=0, le=PEER_BOUNDS.text_bytes_max)]


codec.register_message("signed", SignedRecord, framed=False)
for _kind, _cls in {
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
    "layer-check": LayerCheck,
    "layer-rows": LayerRows,
    "texts-request": TextsRequest,
    "texts-found": TextsFound,
    "text-request": TextRequest,
    "text-piece": TextPiece,
    "other-version": OtherVersion,
}.items():
    codec.register_message(_kind, _cls)
