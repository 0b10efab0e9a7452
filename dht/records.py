"""Signed DHT records: who says what under which key, and until when.

A value in the DHT is the envelope of a :class:`dht.messages.SignedRecord`. Its signature covers
the key, the expiry and the payload, each with its length, behind a prefix of its own; the author's
peer id carries the public key. Stock DHT storage knows no owners: without these checks a later
expiry replaces another peer's record, an infinite one pins a key, and an old record pushes out a
newer one. See the table in ``docs/`` for keys and lifetimes.
"""

import hashlib
import math
import struct
from collections.abc import Callable
from dataclasses import dataclass, field

from dht import wire
from dht.directory import LIFETIME_S, RecordKind
from dht.errors import PeerError
from dht.identity import Identity, verify
from dht.messages import SignedRecord
from dht.types import PEERS_MAX

SIGNATURE_PREFIX = b"anabranch-record-v1\0"
SIGNED_BYTES_MAX = wire.RECORD_BYTES_MAX + 1024
"""Payload, key (at most 512 bytes of it are used), peer id, signature and field names."""
KEY_CHARS_MAX = 512
KEYS_MAX = 4096
"""Keys that one guard follows; each model of each network has four."""
RECORDS_MAX = 65536
"""Records that one guard follows over all keys."""
LIFETIME_FACTOR = 2.0
"""How far beyond its kind's lifetime a record may expire: room for clocks that differ."""
EXPIRY_STEP_S = 0.001
_HEAD = struct.Struct("<IIdI")


class RecordError(PeerError):
    """A record breaks the rules; the message says which."""


def kind_of(key: str) -> RecordKind:
    """The kind of record that ``key`` (``<network>/<model>/<kind>``) holds, or RecordError."""
    network, _, rest = key.partition("/")
    model, _, kind = rest.partition("/")
    if not network or not model or len(key) > KEY_CHARS_MAX:
        raise RecordError(f"{key[:80]!r} is no key of the form network/model/kind")
    try:
        return RecordKind(kind)
    except ValueError:
        raise RecordError(f"key {key[:80]!r} names no known kind of record") from None


def sign_record(identity: Identity, key: str, payload: bytes, expires_unix_s: float) -> bytes:
    """The DHT value that says ``payload`` under ``key`` in the name of ``identity``.

    Raises RecordError for a key of an unknown form and ValueError for a payload over 4 KiB.
    """
    kind_of(key)
    if len(payload) > wire.RECORD_BYTES_MAX:
        raise ValueError(
            f"record of {len(payload)} bytes under {key}; the limit is {wire.RECORD_BYTES_MAX}"
        )
    signed = _signed_bytes(key, identity.peer_id, payload, expires_unix_s)
    return wire.encode(
        SignedRecord(
            key=key,
            peer_id=identity.peer_id,
            expires_unix_s=expires_unix_s,
            payload=payload,
            signature=identity.sign(signed),
        )
    )


def open_record(
    data: bytes, *, key: str | None = None, author: str | None = None, now_unix_s: float
) -> SignedRecord:
    """The record in ``data`` when every rule holds, RecordError otherwise.

    ``key`` and ``author``, where given, are what the record must say of itself.
    """
    record = _decode(data)
    _check_claims(record, key=key, author=author, now_unix_s=now_unix_s)
    _check_signature(record)
    return record


def _decode(data: bytes) -> SignedRecord:
    try:
        return wire.decode_as(SignedRecord, data, limit_bytes=SIGNED_BYTES_MAX)
    except wire.MalformedError as error:
        raise RecordError(f"no signed record: {error}") from error


def _check_claims(
    record: SignedRecord, *, key: str | None, author: str | None, now_unix_s: float
) -> None:
    kind = kind_of(record.key)
    if key is not None and record.key != key:
        raise RecordError(f"a record of {record.key[:80]!r} lies under {key!r}")
    if author is not None and record.peer_id != author:
        raise RecordError(f"a record of {record.peer_id} is given as one of {author[:64]!r}")
    if not math.isfinite(record.expires_unix_s):
        raise RecordError(f"expiry {record.expires_unix_s} is not finite")
    left_s = record.expires_unix_s - now_unix_s
    if left_s <= 0:
        raise RecordError(f"expired {-left_s:.1f} s ago")
    if left_s > LIFETIME_FACTOR * LIFETIME_S[kind]:
        raise RecordError(
            f"expires in {left_s:.0f} s; {kind} records may last"
            f" {LIFETIME_FACTOR * LIFETIME_S[kind]:.0f} s"
        )


def _check_signature(record: SignedRecord) -> None:
    signed = _signed_bytes(record.key, record.peer_id, record.payload, record.expires_unix_s)
    if not verify(record.peer_id, signed, record.signature):
        raise RecordError(f"the signature is not one of {record.peer_id[:64]!r}")


def _signed_bytes(key: str, peer_id: str, payload: bytes, expires_unix_s: float) -> bytes:
    key_bytes, peer_bytes = key.encode(), peer_id.encode()
    head = _HEAD.pack(len(key_bytes), len(peer_bytes), expires_unix_s, len(payload))
    return b"".join((SIGNATURE_PREFIX, head, key_bytes, peer_bytes, payload))


class RecordSigner:
    """Signs one peer's records so that each is newer than the one before it under its key."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._last_s: dict[str, float] = {}

    def sign(self, key: str, payload: bytes, expires_unix_s: float) -> tuple[bytes, float]:
        """The DHT value and its expiry, moved past the last one by a millisecond if need be."""
        last_s = self._last_s.get(key)
        if last_s is not None and expires_unix_s <= last_s:
            expires_unix_s = last_s + EXPIRY_STEP_S
        data = sign_record(self._identity, key, payload, expires_unix_s)
        self._last_s[key] = expires_unix_s
        return data, expires_unix_s


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    digest: bytes
    record: SignedRecord


@dataclass(slots=True)
class RecordGuard:
    """What one peer remembers of records, so that nobody can turn an author's clock back.

    A record must expire later than the last one seen of its author under its key; the very same
    record may come again, and is then not verified anew. Memory is bounded in keys, in authors
    per key and in records; expired records are forgotten. Pure: time is an argument.
    """

    authors_max: int = PEERS_MAX
    keys_max: int = KEYS_MAX
    records_max: int = RECORDS_MAX
    _keys: dict[str, dict[str, _Seen]] = field(default_factory=dict)
    _known: dict[bytes, SignedRecord] = field(default_factory=dict)
    _sweep_at_s: float = -math.inf

    def __len__(self) -> int:
        return len(self._known)

    def admit(
        self,
        data: bytes,
        *,
        key: str | None = None,
        author: str | None = None,
        now_unix_s: float,
        check: Callable[[SignedRecord], None] | None = None,
    ) -> SignedRecord:
        """The record in ``data``, remembered; RecordError when it breaks a rule or is older.

        ``check`` may raise RecordError for rules of the caller's; nothing is remembered then.
        """
        if len(data) > SIGNED_BYTES_MAX:
            raise RecordError(f"record of {len(data)} bytes; the limit is {SIGNED_BYTES_MAX}")
        digest = hashlib.sha256(data).digest()
        known = self._known.get(digest)
        if known is not None:
            _check_claims(known, key=key, author=author, now_unix_s=now_unix_s)
            if check is not None:
                check(known)
            return known
        record = _decode(data)
        _check_claims(record, key=key, author=author, now_unix_s=now_unix_s)
        if check is not None:
            check(record)
        seen = self._keys.get(record.key, {}).get(record.peer_id)
        if seen is not None and record.expires_unix_s <= seen.record.expires_unix_s:
            raise RecordError(
                f"a newer record of {record.peer_id} is known"
                f" ({seen.record.expires_unix_s - record.expires_unix_s:.3f} s newer)"
            )
        _check_signature(record)
        if seen is None:
            self._make_room(record, now_unix_s)
        else:
            del self._known[seen.digest]
        authors = self._keys.setdefault(record.key, {})
        authors[record.peer_id] = _Seen(digest=digest, record=record)
        self._known[digest] = record
        return record

    def living(self, key: str, now_unix_s: float) -> dict[str, SignedRecord]:
        """The newest record of each author under ``key`` that has not expired.

        Reading through this makes reads monotonic: a replica that lags behind cannot take back
        what was seen already.
        """
        authors = self._keys.get(key, {})
        return {a: s.record for a, s in authors.items() if s.record.expires_unix_s > now_unix_s}

    def _make_room(self, record: SignedRecord, now_unix_s: float) -> None:
        """Refuse a new author or key over the bounds; expired ones give room first."""
        reason = self._full(record)
        if reason is not None and now_unix_s >= self._sweep_at_s:
            self.forget_expired(now_unix_s)
            reason = self._full(record)
        if reason is not None:
            raise RecordError(reason)

    def _full(self, record: SignedRecord) -> str | None:
        authors = self._keys.get(record.key)
        if authors is None and len(self._keys) >= self.keys_max:
            return f"{self.keys_max} keys are known already, no room for another"
        if authors is not None and len(authors) >= self.authors_max:
            return f"{self.authors_max} authors are known under this key, no room for another"
        if len(self._known) >= self.records_max:
            return f"{self.records_max} records are known already, no room for another"
        return None

    def forget_expired(self, now_unix_s: float) -> None:
        """Free the memory of records that have expired."""
        # A full guard is swept at most once a second, or refusals would cost a pass each.
        self._sweep_at_s = now_unix_s + 1.0
        for key in list(self._keys):
            authors = self._keys[key]
            for author in [a for a, s in authors.items() if s.record.expires_unix_s <= now_unix_s]:
                del self._known[authors.pop(author).digest]
            if not authors:
                del self._keys[key]
