"""At which addresses a peer is dialled, whoever named them."""

import ipaddress
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dht.identity.dialling import DialRule, Scope, scope_of_given, scope_of_host
from dht.identity.peer_id import Identity
from dht.messages.types import RECORD_BOUNDS

ALICE, BOB, RELAY = (Identity(bytes([n]) * 32).peer_id for n in range(3))
PUBLIC, LOCAL, MACHINE = "/ip4/1.1.1.1/tcp/5", "/ip4/192.168.1.7/tcp/5", "/ip4/127.0.0.1/tcp/5"
NEAR = [
    ipaddress.ip_network(each)
    for each in (
        *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16"),
        *("172.16.0.0/12", "192.168.0.0/16", "224.0.0.0/3"),
        *("::/8", "fc00::/7", "fe80::/10", "ff00::/8"),
    )
]
"""Networks that nobody can mean from outside: of one machine, of one owner, of many receivers."""


def full(address: str, peer_id: str = ALICE) -> str:
    return f"{address}/p2p/{peer_id}"


def relayed(address: str, peer_id: str = ALICE) -> str:
    return f"{address}/p2p/{RELAY}/p2p-circuit/p2p/{peer_id}"


@pytest.mark.parametrize(
    ("host", "scope"),
    [
        ("8.8.8.8", Scope.PUBLIC),
        ("2a00::1", Scope.PUBLIC),
        ("::ffff:8.8.8.8", Scope.PUBLIC),
        ("10.1.2.3", Scope.LOCAL),
        ("172.17.0.1", Scope.LOCAL),
        ("100.64.0.9", Scope.LOCAL),
        ("fd00::1", Scope.LOCAL),
        ("::ffff:192.168.1.1", Scope.LOCAL),
        ("2002:c0a8:101::1", Scope.LOCAL),
        ("127.9.9.9", Scope.MACHINE),
        ("::1", Scope.MACHINE),
        ("::ffff:127.0.0.1", Scope.MACHINE),
        ("2002:7f00:1::", Scope.MACHINE),
        *((host, None) for host in ("0.1.2.3", "::", "169.254.169.254", "fe80::1")),
        ("0.0.0.0", None),  # noqa: S104
        *((host, None) for host in ("224.0.0.1", "ff02::1", "255.255.255.255", "240.0.0.1")),
        *((host, None) for host in ("64:ff9b::a00:1", "::ffff:0.0.0.0", "2001:0:a00:1::1")),
        *((host, None) for host in ("example.org", "", "127.1", "2130706433", "0x7f.0.0.1")),
        *((host, None) for host in ("010.0.0.1", "1.1.1.1%eth0", "fe80::1%eth0", "1.1.1.1 ")),
    ],
)
def test_the_scope_of_a_host(host: str, scope: Scope | None) -> None:
    assert scope_of_host(host) is scope


@pytest.mark.parametrize(
    ("address", "scope"),
    [
        ("/dns4/localhost/tcp/1", Scope.MACHINE),
        ("/dns/founder/tcp/1", Scope.LOCAL),
        ("/dns4/gpu.lan/tcp/1", Scope.LOCAL),
        ("/dns6/example.org/tcp/1", Scope.PUBLIC),
        (PUBLIC, Scope.PUBLIC),
        (relayed(LOCAL), Scope.LOCAL),
        ("nonsense", None),
    ],
)
def test_the_scope_of_an_address_that_the_owner_gave(address: str, scope: Scope | None) -> None:
    assert scope_of_given(address) is scope


@pytest.mark.parametrize(
    ("through", "own", "nearest"),
    [
        ([PUBLIC], [LOCAL, MACHINE], Scope.PUBLIC),  # at home, in a network of strangers
        ([LOCAL], [LOCAL, MACHINE], Scope.LOCAL),  # a home's own network
        ([LOCAL, PUBLIC], [LOCAL], Scope.PUBLIC),
        ([MACHINE], [MACHINE], Scope.MACHINE),  # a demo
        ([MACHINE], [MACHINE, LOCAL], Scope.LOCAL),
        ([MACHINE], [MACHINE, PUBLIC], Scope.PUBLIC),  # a second peer on a public machine
        ([LOCAL], [PUBLIC], Scope.PUBLIC),
        ([], [LOCAL, MACHINE], Scope.LOCAL),  # founders
        ([], [MACHINE], Scope.MACHINE),
        ([], [MACHINE, LOCAL, PUBLIC], Scope.PUBLIC),
        ([MACHINE], [], Scope.MACHINE),  # clients
        ([PUBLIC], [], Scope.PUBLIC),
        (["/dns4/example.org/tcp/1"], [LOCAL], Scope.PUBLIC),
        ([], [], Scope.PUBLIC),
    ],
)
def test_how_far_a_network_reaches(through: list[str], own: list[str], nearest: Scope) -> None:
    rule = DialRule.of(map(full, through), map(full, own))
    assert rule.nearest is nearest
    addresses = {Scope.MACHINE: MACHINE, Scope.LOCAL: LOCAL, Scope.PUBLIC: PUBLIC}
    for scope, address in addresses.items():
        for told in (full(address, BOB), relayed(address, BOB)):
            assert bool(rule.admitted(BOB, (told,))) == (scope >= nearest)


def test_a_founder_learns_that_it_is_public() -> None:
    founder = DialRule.of((), (LOCAL, MACHINE))
    assert founder.seen_at(["192.168.1.9", "", "example.org"]).nearest is Scope.LOCAL
    assert founder.seen_at(["192.168.1.9", "8.8.8.8"]).nearest is Scope.PUBLIC
    alone = DialRule.of((), (MACHINE,)).seen_at(["127.0.0.1"])
    assert alone.nearest is Scope.MACHINE
    # Who joined at home stays there, whatever the router forwards.
    assert DialRule.of((full(LOCAL),), (LOCAL,)).seen_at(["8.8.8.8"]).nearest is Scope.LOCAL


def test_what_the_owner_gave_is_dialled() -> None:
    given_here = (full(LOCAL), full("/dns4/example.org/tcp/1"), full(PUBLIC, BOB))
    rule = DialRule.of(given_here, ())
    assert rule.admitted(ALICE, given_here) == given_here[:2]
    assert rule.admitted(BOB, (full(LOCAL, BOB), full("/dns4/example.org/tcp/1", BOB))) == ()


@pytest.mark.parametrize(
    "address",
    [
        full("/ip4/1.1.1.1/udp/5/quic-v1"),
        full("/ip4/1.1.1.1/udp/5/quic"),
        full("/ip4/1.1.1.1/udp/5/quic-v1/webtransport"),
        full("/ip4/1.1.1.1/tcp/5/ws"),
        full("/ip4/1.1.1.1/tcp/5/tls/sni/example.org/ws"),
        full("/dns4/example.org/tcp/5"),
        full("/dnsaddr/example.org"),
        full("/ip4/1.1.1.1/tcp/5", BOB),
        relayed("/ip4/1.1.1.1/udp/5/quic-v1"),
        relayed("/dns4/example.org/tcp/5"),
        relayed(PUBLIC, BOB),
        f"{PUBLIC}/p2p/{RELAY}/p2p-circuit/p2p/{BOB}/p2p-circuit/p2p/{ALICE}",
        f"/p2p/{RELAY}/p2p-circuit/p2p/{ALICE}",
        f"/ip6zone/eth0/ip6/fe80::1/tcp/5/p2p/{ALICE}",
        full("/unix/tmp/socket"),
        PUBLIC,
        "nonsense",
        "",
    ],
)
def test_what_is_never_dialled_for_a_stranger(address: str) -> None:
    for nearest in Scope:
        told = (address, full(PUBLIC))
        assert DialRule(nearest=nearest).admitted(ALICE, told) == told[1:]


def test_few_addresses_of_a_peer_are_dialled() -> None:
    told = tuple(full(f"/ip4/1.1.1.1/tcp/{port}") for port in range(100))
    assert DialRule().admitted(ALICE, told) == told[: RECORD_BOUNDS.addresses_max]
    told = (*[full("/dns4/example.org/tcp/5")] * RECORD_BOUNDS.addresses_max, full(PUBLIC))
    assert DialRule().admitted(ALICE, told) == (), "of the first that were told"


PARTS = st.sampled_from(
    [
        *("ip4", "ip6", "dns4", "dns", "ip6zone", "tcp", "udp", "quic-v1", "ws", "p2p"),
        *("p2p-circuit", "1.1.1.1", "10.0.0.1", "127.0.0.1", "::1", "2a00::1", "example.org"),
        *("", "5", ALICE, RELAY),
    ]
)
WRITTEN = st.one_of(
    st.lists(PARTS, max_size=12).map(lambda parts: "/" + "/".join(parts)),
    st.tuples(st.ip_addresses(), st.integers(0, 65_535), st.sampled_from([full, relayed])).map(
        lambda it: it[2](f"/ip{it[0].version}/{it[0]}/tcp/{it[1]}")
    ),
    st.text(max_size=80),
)


@given(st.lists(WRITTEN, max_size=12).map(tuple))
def test_whatever_is_written_only_public_tcp_is_dialled(told: tuple[str, ...]) -> None:
    for address in DialRule().admitted(ALICE, told):
        head, _, named = address.rstrip("/").rpartition("/p2p/")
        assert named == ALICE
        _, kind, host, transport, port, *rest = head.split("/")
        ip = ipaddress.ip_address(host)
        assert (kind, transport) == (f"ip{ip.version}", "tcp")
        assert 0 <= int(port) <= 65_535
        assert rest in ([], ["p2p", RELAY, "p2p-circuit"])
        inner = getattr(ip, "ipv4_mapped", None) or getattr(ip, "sixtofour", None) or ip
        assert not any(inner.version == near.version and inner in near for near in NEAR)


@given(st.ip_addresses(), st.sampled_from(list(product([full, relayed], Scope))))
def test_a_nearer_rule_takes_what_a_farther_one_takes(
    ip: ipaddress.IPv4Address | ipaddress.IPv6Address, case: tuple[object, Scope]
) -> None:
    written, nearest = case
    told = (written(f"/ip{ip.version}/{ip}/tcp/1"),)  # type: ignore[operator]
    if DialRule(nearest=nearest).admitted(ALICE, told):
        assert all(DialRule(nearest=s).admitted(ALICE, told) for s in Scope if s <= nearest)
