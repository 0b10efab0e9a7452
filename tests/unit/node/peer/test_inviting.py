"""What a joining peer offers others, and the networks into which it invites nobody."""

import argparse
import asyncio
import io
import random
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from dht.errors import UserError
from dht.identity.peer_id import Identity
from dht.messages.types import ModelSpec
from dht.networks.local_network import Offer
from dht.records.directory import Directory
from dht.transport.config import TransportKind
from node.owner.reporter import Reporter
from node.peer.first_steps import BUNDLED
from node.peer.inviting import (
    ALONE_LOOK_S,
    invite,
    keep_inviting,
    keep_offering,
    offer_here,
    refuse_other_weights,
    warn_of_silent,
)
from testing.network import MemoryNetwork
from tests.unit.records import MODEL, record_of

PEER = Identity(b"1" * 32).peer_id
LOOPBACK, PUBLIC, PRIVATE = (
    f"/ip4/{host}/tcp/31330/p2p/{PEER}" for host in ("127.0.0.1", "1.1.1.1", "10.0.0.7")
)


@pytest.mark.parametrize(
    ("addresses", "kind", "offered", "said"),
    [
        ((LOOPBACK, PUBLIC, PRIVATE), TransportKind.DAEMON, (PRIVATE,), "10.0.0.7:31330"),
        ((LOOPBACK, PUBLIC), TransportKind.DAEMON, None, "Not offered on this network"),
        ((PRIVATE,), TransportKind.LIGHT, None, "A light peer lets nobody in"),
    ],
)
def test_a_peer_offers_private_addresses_where_others_can_join_through_it(
    addresses: tuple[str, ...], kind: TransportKind, offered: tuple[str, ...] | None, said: str
) -> None:
    arguments = argparse.Namespace(name="gaming-pc", network="lab", transport=kind)
    out = io.StringIO()
    offer = offer_here(arguments, addresses, MODEL, Reporter(json_log=False, out=out))
    assert (offer and offer.invitation.addresses) == offered
    assert said in out.getvalue()
    assert "1.1.1.1" not in out.getvalue()


@pytest.mark.virtual(limit_s=1000.0)
async def test_a_peer_is_offered_where_its_machine_is_now() -> None:
    told: list[tuple[str, ...]] = []

    async def advertise(offer: Offer) -> None:
        told.append(offer.invitation.addresses)
        try:
            await asyncio.Event().wait()
        finally:
            told.append(())

    here, moved = [LOOPBACK], PRIVATE.replace("10.0.0.7", "192.168.1.9")
    arguments = argparse.Namespace(
        name="gaming-pc", network="lab", transport=TransportKind.DAEMON, local=True
    )
    reporter = Reporter(json_log=False, out=io.StringIO())
    offering = asyncio.create_task(
        keep_offering(arguments, lambda: here, MODEL, reporter, advertise)
    )
    for address in (PRIVATE, moved):
        await asyncio.sleep(10 * ALONE_LOOK_S)
        here[0] = address
    await asyncio.sleep(10 * ALONE_LOOK_S)
    offering.cancel()
    await asyncio.gather(offering, return_exceptions=True)
    assert told == [(PRIVATE,), (), (moved,), ()]


@pytest.mark.parametrize(
    ("mine", "said", "refused"),
    [
        (MODEL, "", None),
        (MODEL, MODEL.fingerprint[:16], None),
        (replace(MODEL, root="e" * 64), "", "this swarm serves other weights"),
        (MODEL, "0" * 16, "the network was said to serve"),
    ],
)
async def test_nobody_is_invited_to_other_weights_than_the_networks(
    mine: ModelSpec, said: str, refused: str | None
) -> None:
    network = MemoryNetwork(random.Random(0))
    there, here = network.transport(), network.transport()
    await Directory(there, "n", MODEL.key).publish(record_of(there.peer_id, 0, 8))
    with pytest.raises(UserError, match=refused) if refused else nullcontext():
        await refuse_other_weights(Directory(here, "n", MODEL.key), mine, said)


def inviting(host: str, announce: tuple[str, ...] = ()) -> argparse.Namespace:
    return argparse.Namespace(
        host=host, announce=announce, initial_peers=(), founded=True, network="lab", model="m"
    )


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])  # noqa: S104
@pytest.mark.virtual(limit_s=100)
async def test_who_is_on_no_network_invites_nobody_until_it_is(host: str) -> None:
    out = io.StringIO()
    reporter = Reporter(json_log=False, out=out)
    addresses = [LOOPBACK]
    invite(inviting(host), addresses, MODEL, reporter)
    assert "on no network now" in out.getvalue()
    assert "anabranch:" not in out.getvalue()
    keeping = asyncio.create_task(keep_inviting(inviting(host), lambda: addresses, MODEL, reporter))
    await asyncio.sleep(3 * ALONE_LOOK_S)
    assert "anabranch:" not in out.getvalue()
    addresses.append(PRIVATE)
    await asyncio.sleep(3 * ALONE_LOOK_S)
    assert out.getvalue().count(" join anabranch:") == 1
    keeping.cancel()


@pytest.mark.parametrize(
    ("host", "announce"),
    [("127.0.0.1", ()), ("0.0.0.0", ("/ip4/203.0.113.7/tcp/4/",))],  # noqa: S104
)
def test_who_means_to_be_reached_so_invites(host: str, announce: tuple[str, ...]) -> None:
    out = io.StringIO()
    invite(inviting(host, announce), [LOOPBACK], MODEL, Reporter(json_log=False, out=out))
    assert " join anabranch:" in out.getvalue()


async def test_an_announced_address_that_nothing_answers_at_is_named() -> None:
    out = io.StringIO()
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    reporter = Reporter(json_log=False, out=out)
    await warn_of_silent([f"/ip4/127.0.0.1/tcp/{port}"], reporter)
    assert out.getvalue() == ""
    server.close()
    await server.wait_closed()
    await warn_of_silent([f"/ip4/127.0.0.1/tcp/{port}"], reporter)
    assert f"--announce 127.0.0.1:{port}: nothing answers there" in out.getvalue()


@pytest.mark.parametrize("bundled", [True, False])
def test_only_who_lacks_the_files_is_told_to_name_them(bundled: bool, tmp_path: Path) -> None:
    arguments = inviting("127.0.0.1")
    arguments.model = str(BUNDLED if bundled else tmp_path)
    out = io.StringIO()
    invite(arguments, [LOOPBACK], MODEL, Reporter(json_log=False, out=out))
    (line,) = [each for each in out.getvalue().splitlines() if " join anabranch:" in each]
    assert line.endswith(" --model FILES") is not bundled
