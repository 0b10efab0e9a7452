"""Who is greeted again after a cut, and what strangers can make of that."""

from collections.abc import Callable, Iterable, Mapping

import pytest

from dht.records.met import Announced, Met, MetConfig

CONFIG = MetConfig()


def at(*names: str, host: str = "", leaves: bool = False) -> dict[str, Announced]:
    """Peers, each on a host of its own unless ``host`` is given."""
    return {
        name: Announced(
            (f"/ip4/{host or f'10.{number // 250}.{number % 250}.1'}/tcp/1/p2p/{name}",), leaves
        )
        for number, name in enumerate(names)
    }


def met(*names: str) -> Met:
    known = Met()
    known.hear(at(*names), 0.0)
    return known


def came_from(prefixes: Mapping[str, str]) -> Callable[[str], str]:
    return lambda peer_id: prefixes.get(peer_id, "")


def names(count: int, prefix: str = "p") -> list[str]:
    return [f"{prefix}{number}" for number in range(count)]


def test_who_was_met_and_is_not_heard_of_is_greeted_at_its_newest_address() -> None:
    known = met("a", "b")
    known.hear({"a": Announced(("/ip4/10.9.9.9/tcp/2/p2p/a",))}, 5.0)
    assert known.absent({"a", "b"}, 6.0) == {}
    assert known.absent({"b"}, 80.0) == {"a": ("/ip4/10.9.9.9/tcp/2/p2p/a",)}
    assert set(known.absent((), CONFIG.kept_s - 1)) == {"a", "b"}
    assert known.absent((), CONFIG.kept_s + 6) == {}


def test_who_said_that_it_leaves_is_not_missed() -> None:
    known = met("a", "b")
    known.hear(at("a") | at("b", leaves=True), 5.0)
    assert set(known.absent((), 80.0)) == {"a"}


def test_who_answers_and_serves_something_else_is_left_alone_for_a_while() -> None:
    known = met("a")
    known.answered("a", 80.0)
    assert known.absent((), 81.0) == {}
    assert set(known.absent((), 81.0 + CONFIG.answered_s)) == {"a"}
    known.answered("a", 300.0)
    known.hear(at("a"), 301.0)
    assert set(known.absent((), 302.0)) == {"a"}, "it was heard of since"


def test_all_take_turns() -> None:
    known = met(*names(3 * CONFIG.greeted_at_once))
    greeted: set[str] = set()
    for turn in range(3):
        now = known.absent((), 100.0 + turn)
        assert len(now) == CONFIG.greeted_at_once
        greeted |= set(now)
    assert len(greeted) == 3 * CONFIG.greeted_at_once


@pytest.mark.parametrize(
    "crowd", [at(*names(5000, "x")), at(*names(5000, "x"), host="10.7.7.7")], ids=["many", "one"]
)
def test_strangers_cannot_push_out_who_was_met_before(crowd: dict[str, Announced]) -> None:
    known = met("a", "b")
    known.hear(crowd, 1.0)
    assert len(known) <= CONFIG.peers_max

    def greeted(seconds: Iterable[int]) -> set[str]:
        return {peer_id for second in seconds for peer_id in known.absent((), 100.0 + second)}

    assert {"a", "b"} <= greeted(range(CONFIG.peers_max // CONFIG.greeted_at_once + 1))


def test_one_host_has_a_share() -> None:
    known = Met()
    known.hear(at(*names(100, "x"), host="10.7.7.7"), 0.0)
    assert len(known) == CONFIG.per_host_max
    known.hear(at("a"), 1.0)
    assert len(known) == CONFIG.per_host_max + 1


@pytest.mark.parametrize("host", ["10.7.7.{}", "fd00:1:2:{:x}::7"], ids=["IPv4", "IPv6"])
def test_one_prefix_has_a_share(host: str) -> None:
    version = 6 if ":" in host else 4
    crowd = {
        f"x{number}": Announced((f"/ip{version}/{host.format(number)}/tcp/1/p2p/x{number}",))
        for number in range(1, 200)
    }
    known = Met()
    known.hear(crowd, 0.0)
    assert len(known) == CONFIG.per_prefix_max
    known.hear(at("a"), 1.0)
    assert len(known) == CONFIG.per_prefix_max + 1


@pytest.mark.parametrize("claimed", ["10.1.2.3", ""], ids=["its address", "made-up addresses"])
def test_what_strangers_say_of_their_addresses_keeps_out_nobody_who_came_from_elsewhere(
    claimed: str,
) -> None:
    """Records with an honest peer's address, or with made-up ones, filled its places or all."""
    crowd, known = names(1000, "x"), Met()
    known.hear(at(*crowd, host=claimed), 0.0)
    honest = at("a", host="10.1.2.3")
    known.hear(at(*crowd, host=claimed) | honest, 1.0, came_from({"a": "10.1.2.0/24"}))
    assert "a" in known.peers
    assert len(known) <= CONFIG.peers_max


def test_peers_count_where_their_streams_came_from() -> None:
    """Whatever 1,000 identities of one network say, they have that network's share."""
    crowd, known = names(1000, "x"), Met()
    known.hear(at(*crowd), 0.0)
    assert len(known) == CONFIG.peers_max
    known.hear(at(*crowd), 1.0, came_from(dict.fromkeys(crowd, "10.7.7.0/24")))
    assert len(known) == CONFIG.per_prefix_max
    known.hear(at("a", host="10.7.7.7"), 2.0, came_from({"a": "10.1.2.0/24"}))
    assert "a" in known.peers
