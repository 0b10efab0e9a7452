"""Signs and checks DHT records, which bind author, key, payload and expiry.

A value in the DHT is the envelope of a :class:`dht.messages.peer.SignedRecord`. Its signature
covers the key, the author, the expiry, the sequence number and the payload, with their lengths,
after a prefix; the author's peer id carries the public key. Stock DHT storage knows no owners:
without these checks a later expiry would replace another peer's record, an infinite one would pin a
key, and an old record would push out a newer one. The sequence alone says which record is newer: an
expiry follows the author's clock, which may be set back. See the table in ``docs/`` for keys and
lifetimes.
"""

import hashlib
import math
import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from dht.errors import PeerError
from dht.identity.peer_id import Identity, verify
from dht.messages import codec
from dht.messages.peer import SignedRecord
from dht.messages.types import RECORD_BOUNDS
from dht.records.directory import LIFETIME_S, RecordKind

SIGNATURE_PREFIX = b"anabranch-record-v2\0"
SIGNED_BYTES_MAX = codec.SIGNED_BYTES_MAX


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptConfig:
    """How much of signed records is kept, and when they are forgotten."""

    key_chars_max: int = 512
    total_bytes_max: int = 16 << 20
    """Maximum bytes of all records. With the DHT node's copy, each record takes about twice its
    size and a kilobyte of memory."""
    record_overhead_bytes: int = 100
    """Bytes that a record adds to an answer besides its own size."""
    lifetime_factor: float = 2.0
    """Maximum time to a record's expiry, as a multiple of its kind's lifetime: slack for clocks."""
    records_a_turn: int = 16
    """Records that are checked before others get the loop: a signature takes 0.1 ms or more."""
    forget_every_s: float = 30.0
    """Interval at which a guard forgets expired records, whether it needs their room or not."""
    full_forget_every_s: float = 1.0
    """Least interval of a full one: otherwise each refusal would cost a pass."""


KEEPING = KeptConfig()

_HEAD = struct.Struct("<IIdQI")


class RecordError(PeerError):
    """A record breaks the rules; the message says which."""


def kind_of(key: str) -> RecordKind:
    """The kind of record that ``key`` (``<network>/<model>/<kind>``) holds; raises RecordError."""
    network, _, rest = key.partition("/")
    model, _, kind = rest.partition("/")
    if not network or not model or len(key) > KEEPING.key_chars_max:
        raise RecordError(f"{key[:80]!r} is no key of the form network/model/kind")
    try:
        return RecordKind(kind)
    except ValueError:
        raise RecordError(f"key {key[:80]!r} names no known kind of record") from None


def sign_record(
    identity: Identity, key: str, payload: bytes, expires_unix_s: float, sequence: int = 0
) -> bytes:
    """The DHT value with ``payload`` under ``key``, signed by ``identity``.

    Of two records with one ``sequence``, the one that expires later is the newer.

    Raises RecordError for a key of an unknown form and ValueError for a payload over 4 KiB.
    """
    kind_of(key)
    most = codec.FRAME_BOUNDS.record_bytes_max
    if len(payload) > most:
        raise ValueError(f"record of {len(payload)} bytes under {key}; the limit is {most}")
    signed = _signed_bytes(key, identity.peer_id, payload, expires_unix_s, sequence)
    return codec.encode(
        SignedRecord(
            key=key,
            peer_id=identity.peer_id,
            expires_unix_s=expires_unix_s,
            payload=payload,
            signature=identity.sign(signed),
            sequence=sequence,
        )
    )


def open_record(data: bytes, *, author: str | None = None, now_unix_s: float) -> SignedRecord:
    """The record in ``data``, checked against every rule; raises RecordError.

    ``author``, where given, must be the record's own.
    """
    record = _decode(data)
    _check_claims(record, author=author, now_unix_s=now_unix_s)
    _check_signature(record)
    return record


def _decode(data: bytes) -> SignedRecord:
    try:
        return codec.decode_as(SignedRecord, data, limit_bytes=SIGNED_BYTES_MAX)
    except codec.MalformedError as error:
        raise RecordError(f"no signed record: {error}") from error


def _check_claims(record: SignedRecord, *, author: str | None, now_unix_s: float) -> None:
    kind = kind_of(record.key)
    if author is not None and record.peer_id != author:
        raise RecordError(f"a record of {record.peer_id} is given as one of {author[:64]!r}")
    if not math.isfinite(record.expires_unix_s):
        raise RecordError(f"expiry {record.expires_unix_s} is not finite")
    left_s = record.expires_unix_s - now_unix_s
    if left_s <= 0:
        raise RecordError(f"expired {-left_s:.1f} s ago")
    if left_s > KEEPING.lifetime_factor * LIFETIME_S[kind]:
        raise RecordError(
            f"expires in {left_s:.0f} s; {kind} records may last"
            f" {KEEPING.lifetime_factor * LIFETIME_S[kind]:.0f} s"
        )


def _check_signature(record: SignedRecord) -> None:
    signed = _signed_bytes(
        record.key, record.peer_id, record.payload, record.expires_unix_s, record.sequence
    )
    if not verify(record.peer_id, signed, record.signature):
        raise RecordError(f"the signature is not one of {record.peer_id[:64]!r}")


def _signed_bytes(
    key: str, peer_id: str, payload: bytes, expires_unix_s: float, sequence: int
) -> bytes:
    key_bytes, peer_bytes = key.encode(), peer_id.encode()
    head = _HEAD.pack(len(key_bytes), len(peer_bytes), expires_unix_s, sequence, len(payload))
    return b"".join((SIGNATURE_PREFIX, head, key_bytes, peer_bytes, payload))


class RecordSigner:
    """Signs one peer's records, so that each is newer than the one before under its key.

    Only the sequence grows; expiries follow the clock, which may be set back. The sequence begins
    at the expiry in milliseconds: a peer that starts again goes on above its former records.
    """

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._last: dict[str, int] = {}

    @property
    def peer_id(self) -> str:
        return self._identity.peer_id

    def sign(self, key: str, payload: bytes, expires_unix_s: float, above: int = 0) -> bytes:
        """The DHT value. ``above`` is the sequence of this peer's newest record that others gave:
        it may be one of an earlier run, whose clock was ahead."""
        sequence = max(self._last.get(key, 0) + 1, above + 1, int(1000 * expires_unix_s))
        data = sign_record(self._identity, key, payload, expires_unix_s, sequence)
        self._last[key] = sequence
        return data


def _age(record: SignedRecord) -> tuple[int, float]:
    """What is larger in the newer of two records of one author under one key."""
    return record.sequence, record.expires_unix_s


@dataclass(slots=True, kw_only=True)
class _Seen:
    digest: bytes
    record: SignedRecord
    size_bytes: int
    storer: str
    held_until_unix_s: float
    """When this record and all older ones of its author have expired: until then none of those may
    come back."""


class _Shares:
    """How many records each storer brought, and who brought the most.

    A change takes the same time however many storers there are: strangers may be any number.
    """

    def __init__(self) -> None:
        self._of: dict[str, int] = {}
        self._by_count: dict[int, dict[str, None]] = {}
        self._most = 0

    def __getitem__(self, storer: str) -> int:
        return self._of.get(storer, 0)

    def change(self, storer: str, by: int) -> None:
        """Add ``by``, which is 1 or -1."""
        before = self[storer]
        after = before + by
        if before:
            del self._by_count[before][storer]
            if not self._by_count[before]:
                del self._by_count[before]
        if after:
            self._of[storer] = after
            self._by_count.setdefault(after, {})[storer] = None
        else:
            del self._of[storer]
        if after > self._most or (before == self._most and before not in self._by_count):
            self._most = after

    @property
    def largest(self) -> str | None:
        """A storer with the most records; None where there are none."""
        return next(iter(self._by_count[self._most])) if self._most else None


@dataclass(slots=True)
class _Key:
    """The records under one key, by author, their size, and who brought how many."""

    authors: dict[str, _Seen] = field(default_factory=dict)
    size_bytes: int = 0
    shares: _Shares = field(default_factory=_Shares)


@dataclass(slots=True)
class RecordGuard:
    """One peer's memory of records, which refuses records older than those it has seen.

    A record must have a larger sequence than the last one seen of its author under its key; the
    very same record may come again and is then not verified again. Memory is bounded in keys, in
    keys per author, in authors and bytes per key, and in total records and bytes; expired records
    are forgotten. Pure: time is an argument.

    Identities cost nothing, so the peer that *brings* records (the storer) has a share as well:
    where there is no room, the storer with the most records loses its oldest ones to a storer with
    fewer. Honest peers bring their own record each; a peer that brings thousands only pushes out
    its own. Thousands that bring one each keep out neither the keys that this process reads nor its
    own records. ``on_evict`` is called with key and author of each evicted record, also of one that
    a newer record with an earlier expiry replaces: DHT storage would keep the later expiry.
    """

    authors_max: int = RECORD_BOUNDS.peers_max
    keys_max: int = 1024
    """Each model of each network has four keys."""
    records_max: int = 16384
    """Over all keys."""
    key_bytes_max: int = 3_500_000
    """One answer of at most 4 MiB holds a whole key."""
    total_bytes_max: int = KEEPING.total_bytes_max
    author_keys_max: int = 16
    """Keys under which one author may have records."""
    on_evict: Callable[[str, str], None] = lambda key, author: None
    me: str = ""
    """This peer itself: there is always room for its own records."""
    follows: Callable[[str], bool] = lambda key: False
    """Whether this process reads a key, which then has room among any number of others."""
    on_other_version: Callable[[str, int], None] = lambda storer, version: None
    """Called with the storer and the version of each record in another version of the wire."""
    _keys: dict[str, _Key] = field(default_factory=dict)
    _known: dict[bytes, SignedRecord] = field(default_factory=dict)
    _author_keys: Counter[str] = field(default_factory=Counter)
    _brought: dict[str, dict[str, dict[str, None]]] = field(default_factory=dict)
    """Authors of the records brought, by storer and key, oldest first."""
    _shares: _Shares = field(default_factory=_Shares)
    _size_bytes: int = 0
    _swept_unix_s: float = -math.inf

    def __len__(self) -> int:
        return len(self._known)

    def admit(
        self,
        data: bytes,
        *,
        author: str | None = None,
        now_unix_s: float,
        check: Callable[[SignedRecord], None] | None = None,
        storer: str = "",
    ) -> SignedRecord:
        """Check and remember the record in ``data``, which ``storer`` brought.

        Raises RecordError when it breaks a rule or is older than a known one. ``check`` may raise
        it for the caller's own rules; nothing is remembered then.
        """
        if len(data) > SIGNED_BYTES_MAX:
            raise RecordError(f"record of {len(data)} bytes; the limit is {SIGNED_BYTES_MAX}")
        digest = hashlib.sha256(data).digest()
        known = self._known.get(digest)
        if known is not None:
            _check_claims(known, author=author, now_unix_s=now_unix_s)
            if check is not None:
                check(known)
            if storer == known.peer_id:
                self._credit(known, storer)
            return known
        try:
            record = _decode(data)
        except RecordError as error:
            if isinstance(error.__cause__, codec.OtherVersionError):
                self.on_other_version(storer, error.__cause__.theirs)
            raise
        _check_claims(record, author=author, now_unix_s=now_unix_s)
        if check is not None:
            check(record)
        seen = self._seen(record)
        if seen is not None and _age(record) <= _age(seen.record):
            raise RecordError(
                f"a newer record of {record.peer_id} is known"
                f" (sequence {seen.record.sequence}, not {record.sequence})"
            )
        _check_signature(record)
        size_bytes = len(data) + KEEPING.record_overhead_bytes
        self._make_room(record, size_bytes, storer, now_unix_s)
        entry = _Seen(
            digest=digest,
            record=record,
            size_bytes=size_bytes,
            storer=storer,
            held_until_unix_s=record.expires_unix_s,
        )
        self._remember(entry)
        return record

    def living(self, key: str, now_unix_s: float) -> dict[str, SignedRecord]:
        """The newest record of each author under ``key`` that has not expired.

        Reads through it are monotonic: a replica that lags behind cannot take back records that
        were seen already.
        """
        authors = self._keys[key].authors if key in self._keys else {}
        return {a: s.record for a, s in authors.items() if s.record.expires_unix_s > now_unix_s}

    def sequence_of(self, key: str, author: str) -> int:
        """The sequence of the newest record of ``author`` under ``key``; 0: none is known."""
        under = self._keys.get(key)
        seen = None if under is None else under.authors.get(author)
        return 0 if seen is None else seen.record.sequence

    def _seen(self, record: SignedRecord) -> _Seen | None:
        known = self._keys.get(record.key)
        return None if known is None else known.authors.get(record.peer_id)

    def _remember(self, entry: _Seen) -> None:
        """Remember a record, in place of its author's older one."""
        record = entry.record
        older = self._seen(record)
        if older is not None:
            if older.record.expires_unix_s >= record.expires_unix_s:
                self.on_evict(record.key, record.peer_id)
            entry.held_until_unix_s = max(entry.held_until_unix_s, older.held_until_unix_s)
            del self._known[older.digest]
            self._resize(record.key, -older.size_bytes)
            self._debit(older)
        else:
            self._author_keys[record.peer_id] += 1
        self._keys.setdefault(record.key, _Key()).authors[record.peer_id] = entry
        self._resize(record.key, entry.size_bytes)
        self._known[entry.digest] = record
        self._owe(entry)

    def _resize(self, key: str, by_bytes: int) -> None:
        self._keys[key].size_bytes += by_bytes
        self._size_bytes += by_bytes

    def _forget(self, key: str, author: str) -> None:
        under = self._keys[key]
        entry = under.authors.pop(author)
        under.size_bytes -= entry.size_bytes
        self._size_bytes -= entry.size_bytes
        del self._known[entry.digest]
        self._author_keys[author] -= 1
        if not self._author_keys[author]:
            del self._author_keys[author]
        self._debit(entry)
        if not under.authors:
            del self._keys[key]

    def _owe(self, entry: _Seen) -> None:
        record = entry.record
        self._brought.setdefault(entry.storer, {}).setdefault(record.key, {})[record.peer_id] = None
        self._shares.change(entry.storer, 1)
        self._keys[record.key].shares.change(entry.storer, 1)

    def _debit(self, entry: _Seen) -> None:
        brought, key = self._brought[entry.storer], entry.record.key
        del brought[key][entry.record.peer_id]
        if not brought[key]:
            del brought[key]
        self._shares.change(entry.storer, -1)
        self._keys[key].shares.change(entry.storer, -1)
        if not self._shares[entry.storer]:
            del self._brought[entry.storer]

    def _credit(self, record: SignedRecord, storer: str) -> None:
        """Count a record as brought by its author, whom another peer preceded."""
        entry = self._seen(record)
        if entry is not None and entry.storer != storer:
            self._debit(entry)
            entry.storer = storer
            self._owe(entry)

    def _make_room(
        self, record: SignedRecord, size_bytes: int, storer: str, now_unix_s: float
    ) -> None:
        """Make room for a record: drop expired ones, then the oldest of the largest storer.

        Raises RecordError where that is not enough.
        """
        # Otherwise the dead fill all the room there is.
        # A sweep in the future: the clock was set back.
        if not 0 <= now_unix_s - self._swept_unix_s < KEEPING.forget_every_s:
            self.forget_expired(now_unix_s)
        reason = self._full(record, size_bytes)
        if reason is not None and now_unix_s - self._swept_unix_s >= KEEPING.full_forget_every_s:
            self.forget_expired(now_unix_s)
            reason = self._full(record, size_bytes)
        while reason is not None:
            victim = self._greediest(record, storer)
            if victim is None:
                raise RecordError(reason)
            self._forget(*victim)
            self.on_evict(*victim)
            reason = self._full(record, size_bytes)

    def _greediest(self, record: SignedRecord, storer: str) -> tuple[str, str] | None:
        """The oldest record (key, author) of the largest storer, under the key if that is full.

        Where ``storer`` itself has about as many, one that is not needed, for one that is; or None.
        """
        if self._author_keys[record.peer_id] >= self.author_keys_max:
            return None
        here = self._full_here(record.key)
        shares = self._keys[record.key].shares if here else self._shares
        worst = shares.largest
        if worst is None or shares[worst] <= shares[storer] + 1:
            begins = record.key not in self._keys and self.follows(record.key)
            needed = not here and (begins or record.peer_id == self.me)
            return self._needless() if needed else None
        brought = self._brought[worst]
        key = record.key if here else max(brought, key=lambda k: len(brought[k]))
        oldest = (
            author for author in brought[key] if (key, author) != (record.key, record.peer_id)
        )
        return next(((key, author) for author in oldest), None)

    def _needless(self) -> tuple[str, str] | None:
        """A record that this process does not need. Few keys are needed, so few are looked at."""
        return next(
            (
                (key, author)
                for key, under in self._keys.items()
                if (author := next(iter(under.authors))) != self.me and not self.follows(key)
            ),
            None,
        )

    def _full_here(self, key: str) -> bool:
        under = self._keys.get(key)
        return under is not None and (
            len(under.authors) >= self.authors_max
            or under.size_bytes
            > self.key_bytes_max - SIGNED_BYTES_MAX - KEEPING.record_overhead_bytes
        )

    def _full(self, record: SignedRecord, size_bytes: int) -> str | None:
        """The bound that the record would exceed, in words; None: it fits.

        A record that replaces its author's older one counts only by its growth.
        """
        under = self._keys.get(record.key)
        seen = None if under is None else under.authors.get(record.peer_id)
        grows = size_bytes - (seen.size_bytes if seen is not None else 0)
        if under is not None and under.size_bytes + grows > self.key_bytes_max:
            return f"records under this key have {self.key_bytes_max} bytes, no room for more"
        if self._size_bytes + grows > self.total_bytes_max:
            return f"records have {self.total_bytes_max} bytes, no room for more"
        if seen is not None:
            return None
        if self._author_keys[record.peer_id] >= self.author_keys_max:
            return f"{record.peer_id} has records under {self.author_keys_max} keys already"
        if under is None and len(self._keys) >= self.keys_max:
            return f"{self.keys_max} keys are known already, no room for another"
        if under is not None and len(under.authors) >= self.authors_max:
            return f"{self.authors_max} authors are known under this key, no room for another"
        if len(self._known) >= self.records_max:
            return f"{self.records_max} records are known already, no room for another"
        return None

    def forget_expired(self, now_unix_s: float) -> None:
        """Free the memory of records that have expired."""
        self._swept_unix_s = now_unix_s
        expired = [
            (key, author)
            for key, under in self._keys.items()
            for author, entry in under.authors.items()
            if entry.held_until_unix_s <= now_unix_s
        ]
        for key, author in expired:
            self._forget(key, author)
