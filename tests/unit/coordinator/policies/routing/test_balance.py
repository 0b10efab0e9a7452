"""Freeness, and who gives which session to whom: Llumnix (OSDI'24), §4.4."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.policies.routing.balance import (
    Balance,
    BalanceConfig,
    Movable,
    PeerLoad,
    freeness,
    load_of,
    partner_of,
    reported,
    round_trips,
    swapped,
)
from coordinator.policies.routing.routes import NoRoute
from dht.messages.types import Link, LinksRecord, NodeRecord, NodeState, RouteStage
from tests.examples import examples
from tests.unit.records import record_of

CAPACITY = 10_000


def record(peer_id: str, start: int = 0, end: int = 4, **fields: object) -> NodeRecord:
    return record_of(peer_id, start, end, **{"kv_tokens_free": 900, **fields})


def load(free_tokens: int, sessions: int, **fields: int) -> PeerLoad:
    return PeerLoad(
        **{"start": 0, "end": 4, "free_tokens": free_tokens, "sessions": sessions, **fields}
    )


def session(
    name: str,
    *,
    kv_tokens: int = 100,
    ran_tokens: int = 10,
    urgent: bool = False,
    moved_s: float = math.inf,
    route: tuple[str, ...] = ("me",),
) -> Movable:
    return Movable(
        session=name,
        start=0,
        end=4,
        route=frozenset(route),
        neighbours=frozenset({"before", "after"}),
        kv_tokens=kv_tokens,
        left_tokens=kv_tokens - ran_tokens,
        ran_tokens=ran_tokens,
        moved_s=moved_s,
        urgent=urgent,
    )


def test_freeness_is_room_per_session() -> None:
    assert freeness(600, 3) == 200
    assert freeness(600, 0) == 600, "an empty peer is as free as with one"
    assert freeness(-50, 5) == -50 < freeness(-50 + 10, 4), "to have one less is never less free"


def test_what_is_wanted_counts_as_used() -> None:
    assert load(500, 2, wanted_tokens=100).freeness == 200
    assert load(50, 2, wanted_tokens=100).freeness == -50, "headroom is in use"


def test_a_peer_that_leaves_is_the_least_free() -> None:
    told = record("p", state=NodeState.DRAINING)
    assert load_of(told).freeness == -math.inf


def test_as_free_and_half_as_fast_is_half_as_free() -> None:
    mine = record("me")
    slow = record("p", tokens_per_s=(50.0,) * 8, sessions=3)
    assert load_of(slow, beside=mine).freeness == 0.5 * 300
    assert load_of(record("p", tokens_per_s=(), sessions=3), beside=mine).freeness == 300


def test_the_least_free_pairs_with_the_freest_and_the_next_with_the_next() -> None:
    loads = {"a": load(100, 10), "b": load(300, 10), "c": load(5000, 1), "d": load(9000, 1)}

    def partner(me: str) -> str | None:
        others = {peer: each for peer, each in loads.items() if peer != me}
        return partner_of(me, loads[me], others, (0, 4), 2.0)

    assert [partner(peer) for peer in "abcd"] == ["d", "c", None, None]


def test_only_holders_of_the_layers_take() -> None:
    others = {"part": load(9000, 0, end=3), "whole": load(5000, 0, end=8)}
    assert partner_of("me", load(10, 9), others, (0, 4), 2.0) == "whole"
    assert partner_of("me", load(10, 9), {"part": others["part"]}, (0, 4), 2.0) is None


EVENS = BalanceConfig(evens=True)


def ask(mine: PeerLoad, others: dict[str, PeerLoad], *here: Movable) -> list[tuple[str, str]]:
    orders = Balance(me="me", config=EVENS).step(
        0.0, mine, others, here, [each.session for each in here]
    )
    return [(order.session, order.to) for order in orders]


def test_ordinary_sessions_go_the_shortest_first() -> None:
    sessions = [
        session("long", ran_tokens=60),
        session("short"),
        session("urgent", ran_tokens=1, urgent=True),
        session("ending", ran_tokens=99),
        session("came", ran_tokens=1, moved_s=5.0),
        session("there", ran_tokens=1, route=("me", "other")),
    ]
    assert ask(load(100, 6), {"other": load(9000, 0)}, *sessions) == [("short", "other")]


@pytest.mark.parametrize(
    ("mine", "other"),
    [
        (load(9000, 3), load(10_000, 0)),  # too few to be worth it
        (load(5000, 5), load(7000, 5)),  # not free enough beside it
        (load(200, 4), load(130, 1)),  # it would turn around
        (load(-5, 4), load(50, 1)),  # no room
    ],
)
def test_a_move_that_gains_little_is_not_made(mine: PeerLoad, other: PeerLoad) -> None:
    assert ask(mine, {"other": other}, session("s"), session("t")) == []


def link(source: str, target: str, rtt_s: float) -> Link:
    return Link(
        source=source, target=target, bandwidth_bytes_per_s=1e6, rtt_s=rtt_s, measured_unix_s=0.0
    )


def test_by_default_sessions_move_only_where_room_is_short() -> None:
    here, other = [session(name) for name in "abcde"], {"other": load(9000, 0)}
    names = [each.session for each in here]
    balance = Balance(me="me")
    full, short = load(100, 5), load(100, 5, wanted_tokens=200)
    assert balance.needs_others(full), "who would take sessions is known before room is short"
    assert balance.step(0.0, full, other, here, names) == ()
    assert len(balance.step(1.0, short, other, here, names)) == 1


@pytest.mark.parametrize(
    ("far_s", "lacks", "goes"),
    [
        (0.01, 0, True),
        (0.2, 0, False),
        (0.2, 1, False),
        (0.021, 0, True),  # a millisecond more, there and back
        (0.03, 0, False),  # 10 ms on each token keep its KV too long
        (0.03, 1, True),  # unless room is short
        (None, 0, False),  # nobody measured it
    ],
)
def test_who_is_far_from_the_neighbours_is_given_nothing(
    far_s: float | None, lacks: int, goes: bool
) -> None:
    mine = link("before", "me", 0.02), link("me", "after", 0.02), link("before", "after", 9.0)
    told = {"me": mine, "after": (link("me", "after", 0.01),)}
    if far_s is not None:
        told["other"] = link("before", "other", far_s), link("other", "after", far_s)
    records = {p: LinksRecord(peer_id=p, links=each) for p, each in told.items()}
    rtt_s = round_trips(reported(records))
    assert rtt_s[frozenset(("me", "after"))] == 0.02
    assert frozenset(("before", "after")) not in rtt_s, "neither of the two says so"
    here = [session(name) for name in "abcde"]
    orders = Balance(me="me", config=EVENS).step(
        *(0.0, load(0, 5, wanted_tokens=lacks), {"other": load(9000, 0)}, here),
        *({s.session for s in here}, rtt_s),
    )
    assert bool(orders) is goes


def test_the_longer_of_both_ways_counts() -> None:
    for links in (
        (link("a", "b", 0.01), link("b", "a", 0.03)),
        (link("b", "a", 0.03), link("a", "b", 0.01)),
    ):
        assert round_trips(links) == {frozenset("ab"): 0.03}


def test_headroom_that_is_used_moves_even_one_session() -> None:
    used = load(50, 2, wanted_tokens=100)
    here = session("normal"), session("urgent", urgent=True)
    assert ask(used, {"other": load(1000, 0)}, *here) == [("normal", "other")]


def test_one_move_at_a_time_to_each_and_few_in_all() -> None:
    balance = Balance(me="me", config=EVENS)
    mine, others = load(0, 20), {peer: load(9000, 0) for peer in "abc"}
    here = [session(f"{n:02}") for n in range(20)]
    names = {each.session for each in here}
    first = balance.step(0.0, mine, others, here, names)
    assert len(first) == balance.config.moves_max == len({order.to for order in first})
    assert balance.step(1.0, mine, others, here, names) == first, "while they last"
    names.remove(first[0].session)
    there = [each for each in here if each.session in names]
    second = balance.step(2.0, mine, others, there, names)
    assert first[1] in second
    assert len(second) == 2


def test_a_taker_to_whom_nothing_gets_is_not_asked_again_for_a_while() -> None:
    balance = Balance(me="me", config=EVENS)
    here = [session(f"{n}") for n in range(5)]
    names = [each.session for each in here]

    def orders(now_s: float) -> int:
        return len(balance.step(now_s, load(0, 5), {"other": load(9000, 0)}, here, names))

    config = balance.config
    assert orders(0.0) == 1
    assert orders(config.limit_s) == 0
    assert orders(config.limit_s + config.bar_s - 1) == 0
    assert orders(config.limit_s + config.bar_s) == 1


def test_what_was_given_counts_although_the_record_is_old() -> None:
    """The other's record never changes: no more is given than evens the two out."""
    balance = Balance(me="me", config=BalanceConfig(lag_s=1e9, evens=True))
    held = {f"{n:02}": session(f"{n:02}") for n in range(20)}
    given = 0
    for second in range(200):
        mine = load(CAPACITY - 100 * len(held), len(held))
        for order in balance.step(
            float(second), mine, {"other": load(CAPACITY, 0)}, held.values(), held
        ):
            del held[order.session]
            given += 1
    assert 5 <= given <= 10


def test_swapped_puts_one_peer_in_the_place_of_another() -> None:
    route = (RouteStage(peer_id="a", start=0, end=2), RouteStage(peer_id="b", start=2, end=8))
    new = swapped(route, "a", record("c", 0, 4))
    assert not isinstance(new, NoRoute)
    assert [(s.peer_id, s.start, s.end) for s in new] == [("c", 0, 2), ("b", 2, 8)]
    for refused in (
        swapped(route, "b", record("c", 0, 4)),
        swapped(route, "a", record("b", 0, 8)),
        swapped(route, "x", record("c", 0, 8)),
        swapped(route, "a", record("c", 0, 4, state=NodeState.DRAINING)),
    ):
        assert isinstance(refused, NoRoute)


class Peers:
    """Peers that hold the same layers and see each other's loads late, as records show them."""

    def __init__(self, sizes: list[list[int]], speeds: list[float], urgent: list[bool]) -> None:
        names = [f"p{n}" for n in range(len(sizes))]
        self.held = {
            name: {f"{name}.{n}": size for n, size in enumerate(each)}
            for name, each in zip(names, sizes, strict=True)
        }
        self.speeds = dict(zip(names, speeds, strict=True))
        self.urgent = dict(zip(names, urgent, strict=True))
        self.came_s: dict[str, float] = {}
        self.balances = {name: Balance(me=name, config=EVENS) for name in names}

    def load(self, name: str, beside: str) -> PeerLoad:
        held = self.held[name]
        return PeerLoad(
            start=0,
            end=4,
            free_tokens=CAPACITY - sum(held.values()),
            wanted_tokens=CAPACITY // 10 if self.urgent[name] else 0,
            sessions=len(held),
            speed=self.speeds[name] / self.speeds[beside],
        )

    def movable(self, name: str, now_s: float) -> list[Movable]:
        return [
            session(key, kv_tokens=size, moved_s=now_s - self.came_s.get(key, -math.inf))
            for key, size in self.held[name].items()
        ]

    def move(self, key: str, giver: str, taker: str, now_s: float) -> None:
        self.held[taker][key] = self.held[giver].pop(key)
        self.came_s[key] = now_s

    def spread(self) -> float:
        """Least to most free, speeds beside the first peer's."""
        values = [self.load(name, "p0").freeness for name in self.held]
        return max(values) - min(values)


SIZES = st.lists(st.lists(st.integers(50, 600), max_size=16), min_size=2, max_size=4)


@examples(75)
@given(sizes=SIZES, data=st.data())
def test_a_move_never_widens_the_gap(sizes: list[list[int]], data: st.DataObject) -> None:
    """With what is true known to all: every single move brings its two peers closer together."""
    count = len(sizes)
    speeds = data.draw(st.lists(st.sampled_from([0.5, 1.0, 4.0]), min_size=count, max_size=count))
    urgent = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
    peers = Peers(sizes, speeds, urgent)
    for second in range(0, 200, 5):
        for name in peers.held:
            others = {o: peers.load(o, name) for o in peers.held if o != name}
            mine = peers.load(name, name)
            for order in peers.balances[name].step(
                float(second), mine, others, peers.movable(name, second), peers.held[name]
            ):
                before = [peers.load(p, name).freeness for p in (name, order.to)]
                wide = peers.spread()
                peers.move(order.session, name, order.to, second)
                after = [peers.load(p, name).freeness for p in (name, order.to)]
                assert before[0] <= after[0] <= after[1] <= before[1]
                assert len(set(speeds)) > 1 or peers.spread() <= wide


@examples(60)
@given(sizes=SIZES, data=st.data())
def test_it_comes_to_rest_although_records_are_late(
    sizes: list[list[int]], data: st.DataObject
) -> None:
    """Records are up to 15 s old, moves take a while: in the end nothing moves any more."""
    count = len(sizes)
    urgent = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
    offsets = data.draw(st.lists(st.integers(0, 14), min_size=count, max_size=count))
    takes_s = data.draw(st.integers(1, 12))
    peers = Peers(sizes, [1.0] * count, urgent)
    names = list(peers.held)
    told = {name: peers.load(name, name) for name in names}
    begun: dict[tuple[str, str, str], int] = {}
    moves: list[tuple[int, str]] = []
    for second in range(0, 900):
        for name, offset in zip(names, offsets, strict=True):
            if second % 15 == offset:
                told[name] = peers.load(name, name)
            others = {other: told[other] for other in names if other != name}
            orders = peers.balances[name].step(
                float(second),
                peers.load(name, name),
                others,
                peers.movable(name, second),
                peers.held[name],
            )
            for order in orders:
                key = order.session, name, order.to
                if second - begun.setdefault(key, second) >= takes_s:
                    del begun[key]
                    peers.move(order.session, name, order.to, second)
                    moves.append((second, order.session))
    assert all(second < 600 for second, _ in moves), "it never comes to rest"
    sessions = sum(len(each) for each in sizes)
    assert len(moves) <= 2 * sessions, "sessions swing to and fro"
