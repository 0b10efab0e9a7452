"""Signed records: what is covered, when they hold, what a guard remembers."""

import contextlib
import math
from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dht.errors import PeerError
from dht.identity.peer_id import Identity
from dht.messages import codec
from dht.records.directory import LIFETIME_S, RecordKind
from dht.records.signed import (
    KEEPING,
    SIGNED_BYTES_MAX,
    RecordError,
    RecordGuard,
    RecordSigner,
    open_record,
    sign_record,
)

ALICE, BOB = Identity(b"a" * 32), Identity(b"b" * 32)
NOW_S = 1_700_000_000.0
KEY = "net/model/nodes"
LONGEST_S = 2 * LIFETIME_S[RecordKind.NODES]


def signed(
    identity: Identity = ALICE, key: str = KEY, payload: bytes = b"payload", left_s: float = 60.0
) -> bytes:
    return sign_record(identity, key, payload, NOW_S + left_s)


def test_a_signed_record_opens() -> None:
    record = open_record(signed(), author=ALICE.peer_id, now_unix_s=NOW_S)
    assert record.payload == b"payload"
    assert record.peer_id == ALICE.peer_id
    assert record.expires_unix_s == NOW_S + 60


def test_every_bit_is_covered() -> None:
    data = signed()
    for index in range(len(data)):
        for bit in (0x01, 0x80):
            tampered = bytearray(data)
            tampered[index] ^= bit
            with pytest.raises(RecordError):
                open_record(bytes(tampered), now_unix_s=NOW_S)
    for cut in range(len(data)):
        with pytest.raises(RecordError):
            open_record(data[:cut], now_unix_s=NOW_S)


@pytest.mark.parametrize("field", ["key", "peer_id", "expires_unix_s", "payload", "sequence"])
def test_no_field_can_be_exchanged(field: str) -> None:
    version, kind, record = msgspec.msgpack.decode(signed())
    record[field] = {
        "key": "net/other/nodes",
        "peer_id": BOB.peer_id,
        "expires_unix_s": NOW_S + 61,
        "payload": b"pay",
        "sequence": 7,
    }[field]
    with pytest.raises(RecordError, match="signature"):
        open_record(msgspec.msgpack.encode((version, kind, record)), now_unix_s=NOW_S)


@pytest.mark.parametrize(
    ("left_s", "reason"),
    [
        (0.0, "expired"),
        (-1.0, "expired"),
        (LONGEST_S + 1, "may last"),
        (86400.0 * 365, "may last"),
    ],
)
def test_expiry_rules(left_s: float, reason: str) -> None:
    with pytest.raises(RecordError, match=reason):
        open_record(signed(left_s=left_s), now_unix_s=NOW_S)
    open_record(signed(left_s=LONGEST_S), now_unix_s=NOW_S)


@pytest.mark.parametrize("expires", [math.inf, math.nan, -math.inf])
def test_endless_records_are_refused(expires: float) -> None:
    with pytest.raises(RecordError):
        open_record(sign_record(ALICE, KEY, b"", expires), now_unix_s=NOW_S)


@pytest.mark.parametrize("kind", RecordKind)
def test_each_kind_has_its_lifetime(kind: RecordKind) -> None:
    key = f"net/model/{kind}"
    open_record(signed(key=key, left_s=2 * LIFETIME_S[kind]), now_unix_s=NOW_S)
    with pytest.raises(RecordError, match="may last"):
        open_record(signed(key=key, left_s=2 * LIFETIME_S[kind] + 1), now_unix_s=NOW_S)


@pytest.mark.parametrize(
    "key", ["", "nodes", "net/nodes", "net/model/other", "net/a/b/nodes", "/m/nodes", "n//nodes"]
)
def test_unknown_keys(key: str) -> None:
    with pytest.raises(RecordError):
        sign_record(ALICE, key, b"", NOW_S + 1)


def test_the_author_must_match() -> None:
    with pytest.raises(RecordError, match="given as one of"):
        open_record(signed(), author=BOB.peer_id, now_unix_s=NOW_S)
    assert issubclass(RecordError, PeerError)


def test_size_is_bounded() -> None:
    open_record(signed(payload=bytes(codec.FRAME_BOUNDS.record_bytes_max)), now_unix_s=NOW_S)
    with pytest.raises(ValueError, match="limit is 4096"):
        signed(payload=bytes(codec.FRAME_BOUNDS.record_bytes_max + 1))
    with pytest.raises(RecordError, match="limit"):
        open_record(bytes(SIGNED_BYTES_MAX + 1), now_unix_s=NOW_S)
    with pytest.raises(RecordError, match="limit"):
        RecordGuard().admit(bytes(SIGNED_BYTES_MAX + 1), now_unix_s=NOW_S)


@given(st.binary(max_size=300))
def test_other_bytes_are_no_record(data: bytes) -> None:
    with pytest.raises(RecordError):
        open_record(data, now_unix_s=NOW_S)
    with pytest.raises(RecordError):
        RecordGuard().admit(data, now_unix_s=NOW_S)


def test_nobody_turns_the_clock_back() -> None:
    guard = RecordGuard()
    old, new = signed(payload=b"old", left_s=50), signed(payload=b"new", left_s=51)
    guard.admit(old, now_unix_s=NOW_S)
    guard.admit(new, now_unix_s=NOW_S)
    guard.admit(new, now_unix_s=NOW_S)  # the very same again is fine
    with pytest.raises(RecordError, match="newer"):
        guard.admit(old, now_unix_s=NOW_S)
    with pytest.raises(RecordError, match="newer"):
        guard.admit(signed(payload=b"as late", left_s=51), now_unix_s=NOW_S)
    guard.admit(signed(BOB, left_s=10), now_unix_s=NOW_S)  # another's clock is another's
    living = guard.living(KEY, NOW_S + 20)
    assert {a: r.payload for a, r in living.items()} == {ALICE.peer_id: b"new"}
    with pytest.raises(RecordError, match="expired"):
        guard.admit(new, now_unix_s=NOW_S + 52)


def test_a_refused_record_leaves_no_trace() -> None:
    guard = RecordGuard()
    late = bytearray(signed(left_s=100))
    late[-1] ^= 1
    with pytest.raises(RecordError, match="signature"):
        guard.admit(bytes(late), now_unix_s=NOW_S)

    def refuse(_record: object) -> None:
        raise RecordError("not here")

    with pytest.raises(RecordError, match="not here"):
        guard.admit(signed(left_s=99), now_unix_s=NOW_S, check=refuse)
    assert len(guard) == 0
    guard.admit(signed(left_s=50), now_unix_s=NOW_S)


def test_memory_is_bounded() -> None:
    guard = RecordGuard(authors_max=2, keys_max=2, records_max=3)
    people = [Identity(bytes([n]) * 32) for n in range(4)]
    guard.admit(signed(people[0], left_s=5), now_unix_s=NOW_S)
    guard.admit(signed(people[1]), now_unix_s=NOW_S)
    with pytest.raises(RecordError, match="2 authors"):
        guard.admit(signed(people[2]), now_unix_s=NOW_S)
    guard.admit(signed(people[0], left_s=6), now_unix_s=NOW_S)  # known ones may go on
    guard.admit(signed(people[0], "net/b/nodes"), now_unix_s=NOW_S)
    with pytest.raises(RecordError, match="2 keys"):
        guard.admit(signed(people[0], "net/c/nodes"), now_unix_s=NOW_S)
    with pytest.raises(RecordError, match="3 records"):
        guard.admit(signed(people[1], "net/b/nodes"), now_unix_s=NOW_S)
    # What has expired gives room.
    guard.admit(signed(people[2]), now_unix_s=NOW_S + 7)
    assert len(guard) == 3
    guard.forget_expired(NOW_S + 1000)
    assert len(guard) == 0


def test_the_dead_are_forgotten_though_there_is_room() -> None:
    """Thousands of names that come and go must not fill the room that there is."""
    guard = RecordGuard()
    for number, person in enumerate(people(300)):
        guard.admit(signed(person, left_s=number + 20), now_unix_s=NOW_S + number)
        assert len(guard) <= 20 + KEEPING.forget_every_s + 1
    assert len(guard) >= 20


def people(count: int) -> list[Identity]:
    return [Identity(number.to_bytes(32, "big")) for number in range(1, count + 1)]


def test_who_brings_the_most_gives_way() -> None:
    gone: list[tuple[str, str]] = []
    guard = RecordGuard(authors_max=4, on_evict=lambda key, author: gone.append((key, author)))
    crowd = people(6)
    for one in crowd[:4]:
        guard.admit(signed(one), now_unix_s=NOW_S, storer="flooder")
    with pytest.raises(RecordError, match="4 authors"):
        guard.admit(signed(crowd[4]), now_unix_s=NOW_S, storer="flooder")
    guard.admit(signed(ALICE), now_unix_s=NOW_S, storer=ALICE.peer_id)
    guard.admit(signed(BOB), now_unix_s=NOW_S, storer=BOB.peer_id)
    assert gone == [(KEY, crowd[0].peer_id), (KEY, crowd[1].peer_id)]
    assert {ALICE.peer_id, BOB.peer_id} < set(guard.living(KEY, NOW_S))
    # An even share is nobody's to take.
    guard.admit(signed(crowd[5]), now_unix_s=NOW_S, storer=crowd[5].peer_id)
    with pytest.raises(RecordError, match="4 authors"):
        guard.admit(signed(crowd[4]), now_unix_s=NOW_S, storer="another")
    assert len(guard) == 4


def test_a_crowd_with_a_key_each_keeps_out_no_key_that_is_read_here() -> None:
    """None of them brings more than another, so that fairness alone would let nobody in."""
    gone: list[tuple[str, str]] = []
    reads = {KEY, "net/model/lease"}
    guard = RecordGuard(
        keys_max=8,
        records_max=12,
        me=ALICE.peer_id,
        follows=reads.__contains__,
        on_evict=lambda key, author: gone.append((key, author)),
    )
    crowd = people(20)
    guard.admit(signed(BOB), now_unix_s=NOW_S, storer=BOB.peer_id)
    for number, one in enumerate(crowd[:7]):
        key = f"crowd/{number}/nodes"
        guard.admit(signed(one, key), now_unix_s=NOW_S, storer=one.peer_id)
    with pytest.raises(RecordError, match="8 keys"):
        guard.admit(signed(BOB, "net/other/nodes"), now_unix_s=NOW_S, storer="helper")
    guard.admit(signed(BOB, "net/model/lease"), now_unix_s=NOW_S, storer="helper")
    assert gone == [("crowd/0/nodes", crowd[0].peer_id)]
    for one in crowd[7:11]:
        guard.admit(signed(one, "crowd/1/nodes"), now_unix_s=NOW_S, storer=one.peer_id)
    with pytest.raises(RecordError, match="12 records"):  # under a key that is read, all are equal
        guard.admit(signed(crowd[12]), now_unix_s=NOW_S, storer=crowd[12].peer_id)
    guard.admit(signed(ALICE), now_unix_s=NOW_S, storer=ALICE.peer_id)
    assert set(guard.living(KEY, NOW_S)) == {ALICE.peer_id, BOB.peer_id}
    assert len(guard) == 12


def test_a_record_that_its_author_brings_himself_is_his() -> None:
    guard = RecordGuard(authors_max=3)
    crowd = people(4)
    mine = signed(ALICE)
    guard.admit(mine, now_unix_s=NOW_S, storer="flooder")
    for one in crowd[:2]:
        guard.admit(signed(one), now_unix_s=NOW_S, storer="flooder")
    guard.admit(mine, now_unix_s=NOW_S, storer=ALICE.peer_id)
    guard.admit(signed(crowd[3]), now_unix_s=NOW_S, storer=crowd[3].peer_id)
    assert ALICE.peer_id in guard.living(KEY, NOW_S)


def test_bytes_are_bounded_under_a_key_and_over_all() -> None:
    big = bytes(codec.FRAME_BOUNDS.record_bytes_max)
    crowd = people(30)
    guard = RecordGuard(key_bytes_max=20_000, total_bytes_max=30_000)
    taken = 0
    for number, one in enumerate(crowd):
        key = KEY if number % 2 else "net/other/nodes"
        try:
            guard.admit(signed(one, key, payload=big), now_unix_s=NOW_S, storer="flooder")
            taken += 1
        except RecordError:
            continue
    assert taken == 6
    # One that grows is held to the bounds as well; one that is renewed as it is goes on.
    small = RecordGuard(key_bytes_max=5_000)
    small.admit(signed(ALICE, payload=big), now_unix_s=NOW_S)
    small.admit(signed(ALICE, payload=big, left_s=61), now_unix_s=NOW_S)
    with pytest.raises(RecordError, match="5000 bytes"):
        small.admit(signed(BOB, payload=big), now_unix_s=NOW_S)


def test_one_author_has_few_keys() -> None:
    guard = RecordGuard(author_keys_max=2)
    for model in "ab":
        guard.admit(signed(key=f"net/{model}/nodes"), now_unix_s=NOW_S)
    with pytest.raises(RecordError, match="2 keys"):
        guard.admit(signed(key="net/c/nodes"), now_unix_s=NOW_S)
    guard.forget_expired(NOW_S + 1000)
    guard.admit(signed(key="net/c/nodes", left_s=1050), now_unix_s=NOW_S + 1000)


CROWD = [Identity(number.to_bytes(32, "big")) for number in range(1, 6)]


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2), st.integers(1, 99)), max_size=60))
def test_the_books_balance_whatever_comes(moves: list[tuple[int, int, int]]) -> None:
    guard = RecordGuard(authors_max=3, keys_max=2, records_max=5, author_keys_max=2)
    for person, place, left_s in moves:
        with contextlib.suppress(RecordError):
            guard.admit(
                signed(CROWD[person], f"net/{place}/nodes", left_s=left_s),
                now_unix_s=NOW_S,
                storer=str(left_s % 4),
            )
        if left_s % 7 == 0:
            guard.forget_expired(NOW_S + left_s)
        entries = [e for under in guard._keys.values() for e in under.authors.values()]
        assert len(entries) == len(guard) <= 5
        assert guard._size_bytes == sum(e.size_bytes for e in entries)
        assert sum(guard._author_keys.values()) == len(entries)
        for storer, brought in guard._brought.items():
            assert sum(map(len, brought.values())) == guard._shares[storer] > 0
        books = [(guard._shares, entries)]
        books += [(u.shares, list(u.authors.values())) for u in guard._keys.values()]
        for shares, held in books:
            counted = Counter(e.storer for e in held)
            assert shares._of == counted
            assert counted[shares.largest or ""] == max(counted.values(), default=0)


class CountedName(str):
    """A storer whose uses as a key are counted."""

    looks = 0

    def __hash__(self) -> int:
        CountedName.looks += 1
        return super().__hash__()


@pytest.mark.parametrize("bound", ["authors_max", "records_max"])
def test_a_full_guard_takes_no_longer_however_many_brought_its_records(bound: str) -> None:
    looks: list[int] = []
    for many in (20, 80):
        guard = RecordGuard(**{bound: many})
        for number, one in enumerate(people(many)):
            guard.admit(signed(one), now_unix_s=NOW_S, storer=CountedName(number))
        before = CountedName.looks
        with pytest.raises(RecordError, match="no room for another"):
            guard.admit(signed(ALICE), now_unix_s=NOW_S, storer=CountedName("one more"))
        looks.append(CountedName.looks - before)
    assert looks[1] == looks[0] < 20


def test_a_signers_records_are_each_newer() -> None:
    signer, guard = RecordSigner(ALICE), RecordGuard()
    for left_s in (60.0, 60.0, 10.0, 70.0):
        data = signer.sign(KEY, b"", NOW_S + left_s)
        assert guard.admit(data, now_unix_s=NOW_S).expires_unix_s == NOW_S + left_s


@pytest.mark.parametrize("ahead_s", [20.0, 55.0, 8 * 3600.0, 1e9])
def test_a_clock_that_was_ahead_does_no_harm_once_it_is_right(ahead_s: float) -> None:
    signer, guard = RecordSigner(ALICE), RecordGuard()
    ahead = signer.sign(KEY, b"ahead", NOW_S + ahead_s + 60)
    with contextlib.suppress(RecordError):  # far ahead, nobody takes it
        guard.admit(ahead, now_unix_s=NOW_S)
    right = signer.sign(KEY, b"right", NOW_S + 60)
    assert guard.admit(right, now_unix_s=NOW_S).expires_unix_s == NOW_S + 60
    assert guard.living(KEY, NOW_S)[ALICE.peer_id].payload == b"right"
    with pytest.raises(RecordError):
        guard.admit(ahead, now_unix_s=NOW_S)


def test_a_replaced_record_stays_away_though_it_would_live_longer() -> None:
    """Whoever kept it must not bring it back once the newer one has expired."""
    gone: list[tuple[str, str]] = []
    guard = RecordGuard(on_evict=lambda key, author: gone.append((key, author)))
    signer = RecordSigner(ALICE)
    long = signer.sign(KEY, b"long", NOW_S + 110)
    short = signer.sign(KEY, b"short", NOW_S + 20)
    guard.admit(long, now_unix_s=NOW_S)
    guard.admit(short, now_unix_s=NOW_S)
    assert gone == [(KEY, ALICE.peer_id)], "or DHT storage keeps the one that expires later"
    guard.forget_expired(NOW_S + 30)
    assert not guard.living(KEY, NOW_S + 30)
    with pytest.raises(RecordError, match="newer"):
        guard.admit(long, now_unix_s=NOW_S + 30)
    guard.forget_expired(NOW_S + 111)
    assert len(guard) == 0


def test_a_peer_that_starts_again_goes_on_above_its_former_records() -> None:
    """Its former clock was ahead by less than others refuse, and its sequence with it."""
    guard = RecordGuard()
    former = RecordSigner(ALICE).sign(KEY, b"former", NOW_S + 115)
    guard.admit(former, now_unix_s=NOW_S)
    above = guard.sequence_of(KEY, ALICE.peer_id)  # as others gave it back
    data = RecordSigner(ALICE).sign(KEY, b"now", NOW_S + 60, above)
    assert guard.admit(data, now_unix_s=NOW_S).payload == b"now"


def test_a_guard_whose_clock_was_set_back_goes_on_forgetting() -> None:
    guard = RecordGuard()
    guard.forget_expired(NOW_S + 8 * 3600)
    for number, person in enumerate(people(300)):
        guard.admit(signed(person, left_s=number + 20), now_unix_s=NOW_S + number)
        assert len(guard) <= 20 + KEEPING.forget_every_s + 1
