"""A stock libp2p host speaks every protocol wrongly, in 50 ways at once, to two full peers."""

import asyncio
import json
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from dht.daemon.transport import HivemindTransport
from dht.identity.peer_id import Identity
from dht.transport.config import TransportConfig
from dht.transport.interface import Transport
from tests.e2e.light import needs_libp2p, run_light
from tests.sim.paper_swarm import SPEC, PaperSwarm, answer_of
from tests.sim.test_wrong_protocol import NAMED, refusals, serve_everything
from tests.sim.wrong_ways import PROMPT, QUICK_WAYS

pytestmark = [pytest.mark.e2e, needs_libp2p]


class RealSwarm(PaperSwarm):
    """Paper engines behind real libp2p daemons."""

    near: tuple[str, ...] = ()

    async def transport(self) -> Transport:
        made = await HivemindTransport.create(
            TransportConfig(identity=Identity.generate(), host="127.0.0.1", initial_peers=self.near)
        )
        self.near = self.near or made.addresses
        return made


async def asked(swarm: RealSwarm) -> tuple[int, ...]:
    """An honest client's answer."""
    async with swarm.client(transport=await swarm.transport()) as client:
        return (await client.generate(PROMPT, max_new_tokens=50)).token_ids


async def test_a_stock_host_that_speaks_wrongly_is_cut_off_in_time(tmp_path: Path) -> None:
    swarm = RealSwarm()
    try:
        await serve_everything(swarm)
        target = tmp_path / "target.json"
        addresses = {peer.peer_id: peer.transport.addresses for peer in swarm.peers}
        target.write_bytes(
            msgspec.json.encode(
                {
                    "route": swarm.route,
                    "fingerprint": SPEC.fingerprint,
                    "addresses": addresses,
                }
            )
        )
        wrong = ["tests.e2e.light_wrong_protocol", str(target)]
        going = asyncio.create_task(asyncio.to_thread(run_light, wrong))
        while not going.done():
            assert await asked(swarm) == answer_of(PROMPT, 50)
        assert json.loads(going.result()) == {}
        counted = Counter[str]()
        for peer in swarm.peers:
            counted += refusals(peer)
            assert peer.transport.stream_errors.keys() <= NAMED
        wanted = Counter(way.counted for way in QUICK_WAYS if way.counted not in {"", "ended"})
        assert not wanted - counted
        assert len(QUICK_WAYS) >= 50
    finally:
        await swarm.close()
