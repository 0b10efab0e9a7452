"""Who shares a connection, by signed claims alone, and what a planner takes it to carry."""

from dataclasses import replace
from typing import Any

from coordinator.evaluation.max_flow import solve_flow
from coordinator.evaluation.shared_uplinks import shared_uplinks
from coordinator.problem.from_records import problem_of
from dht.identity.uplink import claim_of
from dht.messages.types import Link, LinksRecord, NodeRecord, Problem, SharedUplink, UplinkClaim
from tests.unit.coordinator.problems import model, record, span

SECRET, STRANGERS = bytes(32), bytes([7]) * 32
MODEL = model(2)


def claim(peer_id: str, secret: bytes = SECRET, up: float | None = None) -> UplinkClaim:
    return replace(claim_of(secret, "net", peer_id), up_bytes_per_s=up)


def problem(links: tuple[Link, ...] = (), **fields: dict[str, Any]) -> Problem:
    """Peers by name, with what they say; each can hold a layer at 1,000 tokens/s."""
    records: dict[str, NodeRecord] = {
        name: replace(record(name, 0, 0, rates=(1000.0,), layers=2), memory_bytes=1000, **said)
        for name, said in fields.items()
    }
    told: dict[str, tuple[Link, ...]] = {}
    for link in links:
        told[link.target] = (*told.get(link.target, ()), link)
    measured = {name: LinksRecord(peer_id=name, links=each) for name, each in told.items()}
    return problem_of(MODEL, records, measured)


def link(source: str, target: str, bytes_per_s: float) -> Link:
    return Link(
        source=source,
        target=target,
        bandwidth_bytes_per_s=bytes_per_s,
        rtt_s=0.01,
        measured_unix_s=0.0,
    )


def rate_of(found: Problem) -> float | None:
    (uplink,) = found.uplinks
    return uplink.up_bytes_per_s


def test_two_peers_that_show_one_key_share_and_a_lone_one_has_its_own() -> None:
    mine = claim("a", up=5e6)
    alone = problem(a={"uplink": mine, "up_bytes_per_s": 5e6}, b={})
    assert alone.uplinks == ()
    assert alone.nodes[0].up_bytes_per_s == 5e6
    both = problem(a={"uplink": mine, "up_bytes_per_s": 5e6}, b={"uplink": claim("b")})
    assert both.uplinks == (SharedUplink(name=mine.uplink, up_bytes_per_s=5e6),)
    assert [node.uplink for node in both.nodes] == [mine.uplink] * 2
    assert both.nodes[0].up_bytes_per_s is None, "what was measured binds no link within the home"


def test_what_is_lent_of_the_connection_stays_each_peers_own() -> None:
    lent = problem(
        a={"uplink": claim("a", up=5e6), "up_bytes_per_s": 1e6},
        b={"uplink": claim("b"), "up_bytes_per_s": 2e6},
    )
    assert [node.up_bytes_per_s for node in lent.nodes] == [1e6, 2e6]
    assert rate_of(lent) == 5e6
    links = (link("a", "c", 1e6),)
    halves = {name: {"uplink": claim(name), "up_bytes_per_s": 1e6} for name in "ab"}
    assert rate_of(problem(links, **halves, c={})) is None, "each half is known"


def test_the_most_that_was_measured_counts_or_else_the_fastest_link_to_elsewhere() -> None:
    """One that measured while the other sent saw less; a link within the home is none of it."""
    said = {"a": {"uplink": claim("a", up=5e6)}, "b": {"uplink": claim("b", up=2e6)}}
    assert rate_of(problem(**said)) == 5e6
    links = (link("a", "c", 3e6), link("b", "c", 4e6), link("a", "b", 9e8), link("c", "a", 9e7))
    unknown = {name: {"uplink": claim(name)} for name in "ab"}
    assert rate_of(problem(links, **unknown, c={})) == 4e6
    assert rate_of(problem(**unknown, c={})) is None


def test_nobody_gets_behind_another_s_connection() -> None:
    """A stranger copies a claim, or signs one himself, for a rate of nearly nothing."""
    honest = {name: {"uplink": claim(name, up=5e6)} for name in "ab"}
    copied = replace(claim("a"), up_bytes_per_s=1e-3)
    forged = replace(claim("x", STRANGERS, up=1e12), uplink=claim("a").uplink)
    for lie in (copied, forged):
        found = problem(**honest, x={"uplink": lie})
        assert {node.peer_id: node.uplink for node in found.nodes}["x"] == ""
        assert rate_of(found) == 5e6
    one = problem(a=honest["a"], x={"uplink": copied})
    assert one.uplinks == (), "with a liar, a lone peer is still alone"


def test_nobody_is_put_behind_a_strangers_connection() -> None:
    """A stranger's key signs an honest peer's id; that peer's own record names another key."""
    found = problem(
        a={"uplink": claim("a", up=5e6)},
        x={"uplink": claim("a", STRANGERS, up=1.0)},
        y={"uplink": claim("y", STRANGERS, up=1.0)},
    )
    assert not shared_uplinks(found).of_peer


def test_a_made_up_connection_costs_its_liar_alone() -> None:
    """Two identities of one stranger that say that they share next to nothing."""
    rest = {name: {} for name in "abcd"}
    spans = [span(name, 0, 1) for name in "abx"] + [span(name, 1, 2) for name in "cdy"]
    free = problem(**rest, x={}, y={})
    lie = problem(
        **rest,
        x={"uplink": claim("x", STRANGERS, up=1.0)},
        y={"uplink": claim("y", STRANGERS, up=1.0)},
    )
    honest = [a for a in spans if a.peer_id in rest]
    assert solve_flow(free, honest).flow_tokens_per_s == 2000
    assert solve_flow(lie, spans).flow_tokens_per_s >= 2000
