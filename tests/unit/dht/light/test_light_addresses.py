"""Where a light peer dials: its owner's word counts as it is, that of others when checked."""

import asyncio

import pytest

from dht.errors import NetworkError
from dht.identity.peer_id import Identity
from dht.light.transport import LightTransport
from dht.messages.types import RECORD_BOUNDS
from dht.transport.config import OWN_ADDRESS, TransportConfig
from dht.transport.interface import RECORDS_PROTOCOL

OWN = Identity(b"o" * 32)
ALICE, BOB = Identity(b"a" * 32).peer_id, Identity(b"b" * 32).peer_id
GIVEN = tuple(f"/ip4/10.0.0.{number}/tcp/1" for number in range(1, RECORD_BOUNDS.addresses_max + 3))


class Dialled:
    """A host that notes where it would have dialled."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()
        self.last_words = ""
        self.calls: list[tuple[str, tuple[str, ...]]] = []

    async def open(self, peer_id: str, protocol: str, dialled: tuple[str, ...]) -> None:
        self.calls.append((peer_id, dialled))
        raise NetworkError("nobody is there")


async def dialled_for(
    peer_id: str,
    told: tuple[str, ...],
    *,
    helper: bool,
    given: tuple[str, ...] = tuple(f"{address}/p2p/{ALICE}" for address in GIVEN),
) -> tuple[str, ...]:
    light = LightTransport(TransportConfig(identity=OWN, initial_peers=given))
    host = light._host = Dialled()
    asking = (
        light._open_helper(peer_id, RECORDS_PROTOCOL, told)
        if helper
        else light.open_stream(peer_id, RECORDS_PROTOCOL, addresses=told)
    )
    with pytest.raises(NetworkError, match="nobody is there"):
        await asking
    [(asked, dialled)] = host.calls
    assert asked == peer_id
    return dialled


@pytest.mark.virtual(limit_s=10.0)
@pytest.mark.parametrize("helper", [True, False])
async def test_what_others_tell_is_checked_and_bounded(helper: bool) -> None:
    bare = tuple(f"/ip4/1.1.1.1/tcp/{port}" for port in range(100))
    full = tuple(f"{address}/p2p/{BOB}" for address in bare)
    odd = ("/ip4/1.1.1.1/udp/1", "/unix/tmp/socket", "nonsense", f"{bare[0]}/p2p/{ALICE}")

    assert await dialled_for(BOB, bare, helper=helper) == ()
    assert await dialled_for(BOB, odd, helper=helper) == ()
    assert await dialled_for(BOB, full, helper=helper) == bare[: RECORD_BOUNDS.addresses_max]
    # One bare address does not displace those that name the peer.
    assert await dialled_for(BOB, (bare[5], full[0]), helper=helper) == bare[:1]


@pytest.mark.virtual(limit_s=10.0)
@pytest.mark.parametrize("helper", [True, False])
async def test_what_others_tell_is_not_nearer_than_what_the_owner_gave(helper: bool) -> None:
    """The owner gave private addresses: this machine itself is nearer, and names say nothing."""
    near = ("/ip4/127.0.0.1/tcp/1", "/ip4/169.254.169.254/tcp/80", "/dns4/localhost/tcp/1")
    home, far = "/ip4/192.168.1.1/tcp/1", "/ip4/1.1.1.1/tcp/1"
    told = tuple(f"{address}/p2p/{BOB}" for address in (*near, home, far))
    public = (f"/ip4/8.8.8.8/tcp/1/p2p/{ALICE}",)

    assert await dialled_for(BOB, told, helper=helper) == (home, far)
    assert await dialled_for(BOB, told, helper=helper, given=public) == (far,)


@pytest.mark.virtual(limit_s=10.0)
async def test_peers_are_dialled_through_relays_last_and_never_through_oneself() -> None:
    direct = f"/ip4/1.1.1.1/tcp/1/p2p/{BOB}"
    ours, theirs = (f"/ip4/2.2.2.2/tcp/2/p2p/{relay}/p2p-circuit" for relay in (OWN.peer_id, ALICE))
    told = (f"{ours}/p2p/{BOB}", f"{theirs}/p2p/{BOB}", direct)

    assert await dialled_for(BOB, told, helper=False) == ("/ip4/1.1.1.1/tcp/1", theirs)
    # Those whom others told of as helpers are asked directly.
    assert await dialled_for(BOB, told, helper=True) == ("/ip4/1.1.1.1/tcp/1",)


@pytest.mark.virtual(limit_s=10.0)
async def test_the_owner_s_helpers_are_dialled_where_the_owner_said() -> None:
    assert await dialled_for(ALICE, GIVEN, helper=True) == GIVEN


@pytest.mark.virtual(limit_s=100.0)
async def test_a_light_peer_whose_network_changes_says_where_it_is_now(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Listening(Dialled):
        async def start(self, listen: tuple[str, ...], *, limit_s: float) -> tuple[str, ...]:
            return ("/ip4/0.0.0.0/tcp/7",)

        async def stop(self) -> None:
            self.ended.set()

    here = "192.168.1.2"
    monkeypatch.setattr("dht.light.transport.expanded", lambda _: [f"/ip4/{here}/tcp/7"])
    monkeypatch.setattr("dht.light.transport._load", lambda: lambda *_: Listening())
    given = (f"{GIVEN[0]}/p2p/{ALICE}",)
    light = LightTransport(TransportConfig(identity=OWN, initial_peers=given))
    await light._start(1.0)
    assert light.addresses == (f"/ip4/192.168.1.2/tcp/7/p2p/{OWN.peer_id}",)
    here = "10.7.0.5"
    await asyncio.sleep(2 * OWN_ADDRESS.look_s)
    assert light.addresses == (f"/ip4/10.7.0.5/tcp/7/p2p/{OWN.peer_id}",)
    await light.close()
