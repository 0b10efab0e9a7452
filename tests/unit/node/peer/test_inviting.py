"""What a joining peer offers on its local network, and where it says that it does not."""

import argparse
import io

import pytest

from dht.identity.peer_id import Identity
from dht.transport.config import TransportKind
from node.owner.reporter import Reporter
from node.peer.inviting import offer_here
from tests.unit.records import MODEL

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
