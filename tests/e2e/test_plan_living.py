"""``coordinator.plan`` on a living swarm: real daemons on loopback, a real command."""

import asyncio
import json
import sys
from dataclasses import replace

import pytest

from dht.daemon.transport import HivemindTransport
from dht.identity.peer_id import Identity
from dht.records.directory import Directory
from dht.transport.config import TransportConfig
from tests.unit.coordinator.conftest import make_record

pytestmark = pytest.mark.e2e


async def opened(*initial_peers: str) -> HivemindTransport:
    return await HivemindTransport.create(
        TransportConfig(identity=Identity.generate(), host="127.0.0.1", initial_peers=initial_peers)
    )


async def planned(address: str, *more: str) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "coordinator.plan", "--initial-peers", address, "--json"),
        *("--time-limit", "1", *more),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    return process.returncode or 0, out.decode(), err.decode()


async def test_peers_that_announce_themselves_are_planned():
    first = await opened()
    second = await opened(first.addresses[0])
    try:
        for peer in (first, second):
            record = replace(make_record(peer.peer_id, memory=500), addresses=peer.addresses)
            assert await Directory(peer, "net", record.model.key).publish(record)
        code, out, err = await planned(first.addresses[0], "--model", "tiny", "--network", "net")
        assert code == 0, err
        placement = json.loads(out)["placement"]
        assert set(placement) == {first.peer_id, second.peer_id}
        assert sorted(placement.values())[0][0] == 0
        assert max(end for _, end in placement.values()) == 8
        code, out, err = await planned(first.addresses[0], "--model", "other")
        assert (code, out) == (2, "")
        assert err == "error: no peer announces other\n"
    finally:
        await second.close()
        await first.close()
