"""Who comes back finds the network through others, also where it founded it."""

import argparse
import asyncio
import io
import random
from pathlib import Path
from typing import Any

import pytest

from dht.errors import NetworkError
from dht.identity.dialling import DialRule
from dht.messages.types import RECORD_BOUNDS, NodeState
from dht.networks.remembered import VARIABLE, Remembered, remember
from dht.records.directory import Directory
from node.owner.reporter import Reporter
from node.peer.remembering import (
    LOOK_S,
    addresses_to_keep,
    connect_or_found,
    founded_by,
    remember_others,
    settle_addresses,
)
from testing.network import MemoryNetwork
from tests.unit.records import MODEL, record_of

OWN = ("/ip4/10.0.0.1/tcp/1/p2p/me", "/ip4/127.0.0.1/tcp/1/p2p/me")

FRIEND = "/ip4/10.0.0.9/tcp/1/p2p/friend"
OTHER = "/ip4/10.0.0.8/tcp/1/p2p/other"


def test_a_founder_keeps_its_own_address_first_and_those_of_others_behind() -> None:
    alone = addresses_to_keep(OWN, (), (), founded=True)
    assert alone == OWN
    met = tuple(f"/ip4/10.0.1.{n}/tcp/1/p2p/p{n}" for n in range(20))
    kept = addresses_to_keep(OWN, (), met, founded=True)
    assert kept == (OWN[0], *met[: RECORD_BOUNDS.addresses_max - 1])
    assert founded_by("me", alone)
    assert founded_by("me", kept)


def test_who_joined_keeps_an_address_that_its_owner_gave_before_those_of_strangers() -> None:
    given = (FRIEND, OTHER)
    kept = addresses_to_keep(OWN, given, ("/ip4/10.0.1.1/tcp/1/p2p/p",), founded=False)
    assert kept == (given[0], "/ip4/10.0.1.1/tcp/1/p2p/p", given[1], *OWN)
    assert not founded_by("me", kept)
    assert not founded_by("me", ())


@pytest.mark.virtual(limit_s=600)
async def test_peers_that_serve_are_remembered_and_stay_so_when_they_are_gone() -> None:
    kept: list[tuple[str, ...]] = []
    network = MemoryNetwork(random.Random(0))
    me, one, waits, far = (network.transport() for _ in range(4))
    told = {
        one: ("/ip4/10.0.0.2/tcp/1", NodeState.SERVING),
        waits: ("/ip4/10.0.0.3/tcp/1", NodeState.WAITING),
        far: ("/ip4/127.0.0.1/tcp/1", NodeState.SERVING),
    }
    for peer, (address, state) in told.items():
        full = f"{address}/p2p/{peer.peer_id}"
        record = record_of(peer.peer_id, 0, 8, state=state, addresses=(full,))
        await Directory(peer, "n", MODEL.key).publish(record)
    rule = DialRule.of((), ("/ip4/10.0.0.1/tcp/1",))
    directory = Directory(me, "n", MODEL.key)
    loop = asyncio.create_task(
        remember_others(directory, me.peer_id, rule, lambda met: kept.append(tuple(met)))
    )
    await asyncio.sleep(20 * LOOK_S)  # records last less long
    loop.cancel()
    assert not await directory.nodes()
    assert kept == [(f"/ip4/10.0.0.2/tcp/1/p2p/{one.peer_id}",)], "once, and no other"


@pytest.mark.parametrize(
    ("first", "tries"), [("me", [[OTHER], []]), ("friend", [[FRIEND, OTHER]])], ids=["own", "given"]
)
def test_only_who_founded_a_network_founds_it_once_more_where_nobody_answers(
    first: str, tries: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[list[str]] = []
    remembered = [OWN[0] if first == "me" else FRIEND, OTHER, OWN[1]]
    arguments = argparse.Namespace(
        recalled=True, local=False, network="n", initial_peers=remembered
    )
    monkeypatch.setenv(VARIABLE, "")

    async def connect() -> Any:
        tried.append(arguments.initial_peers)
        if arguments.initial_peers:
            raise NetworkError("nobody answers")
        return "founded"

    settle_addresses(arguments, "me")
    connecting = connect_or_found(arguments, connect, Reporter(json_log=False, out=io.StringIO()))
    if first == "me":
        assert asyncio.run(connecting) == "founded"
    else:
        with pytest.raises(NetworkError):
            asyncio.run(connecting)
    assert tried == tries


@pytest.mark.parametrize("network", ["n", "another"])
def test_where_the_founder_has_moved_those_that_are_remembered_are_asked(
    network: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "network.json"))
    remember(Remembered(network=network, initial_peers=(FRIEND, OTHER, OWN[0])), lambda text: None)
    arguments = argparse.Namespace(recalled=False, local=False, network="n", initial_peers=[FRIEND])
    tried: list[list[str]] = []

    async def connect() -> Any:
        tried.append(arguments.initial_peers)
        if OTHER not in arguments.initial_peers:
            raise NetworkError("nobody answers")
        return "joined"

    settle_addresses(arguments, "me")
    connecting = connect_or_found(arguments, connect, Reporter(json_log=False, out=io.StringIO()))
    if network == "n":
        assert asyncio.run(connecting) == "joined"
        assert tried == [[FRIEND], [OTHER]]
    else:
        with pytest.raises(NetworkError):
            asyncio.run(connecting)
        assert tried == [[FRIEND]]
