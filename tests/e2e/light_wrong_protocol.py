"""A stock libp2p host (py-libp2p) that speaks wrongly, in many ways at once.

python -m tests.e2e.light_wrong_protocol ROUTE.json

Prints the ways that did not go as they should, with what happened instead, as JSON.
"""

import asyncio
import json
import sys
from pathlib import Path

import msgspec

from dht.errors import NetworkError
from dht.identity.peer_id import Identity
from dht.light.transport import LightTransport
from dht.messages.session import RouteStage
from dht.transport.config import TransportConfig
from dht.transport.interface import HOP_PROTOCOL
from tests.sim.wrong_ways import QUICK_WAYS, Way, WrongPeer, ended

SLOW_MACHINE_S = 60.0


class Target(msgspec.Struct):
    """The peers that are spoken to."""

    route: tuple[RouteStage, ...]
    fingerprint: str
    addresses: dict[str, tuple[str, ...]]


async def go(evil: LightTransport, target: Target, number: int, way: Way) -> str:
    """Go one way; returns what was wrong, or nothing."""
    wrong = WrongPeer(evil, target.route, target.fingerprint, f"{number:032d}")
    peer_id = target.route[way.target].peer_id
    try:
        async with asyncio.timeout(way.limit_s + SLOW_MACHINE_S):
            wrong.stream = await evil.open_stream(
                peer_id, way.protocol, addresses=target.addresses[peer_id]
            )
            try:
                await wrong.do(list(way.steps))
                if way.ends:
                    await ended(wrong.stream)
            finally:
                await wrong.stream.close()
    except (AssertionError, NetworkError, TimeoutError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


async def main(target: Target) -> None:
    near = target.addresses[target.route[0].peer_id]
    evil = await LightTransport.create(
        TransportConfig(identity=Identity.generate(), host="127.0.0.1", initial_peers=near)
    )
    try:
        await evil.serve(HOP_PROTOCOL, ended)
        each = [go(evil, target, number, way) for number, way in enumerate(QUICK_WAYS)]
        said = await asyncio.gather(*each)
    finally:
        await evil.close()
    print(json.dumps({way.name: why for way, why in zip(QUICK_WAYS, said, strict=True) if why}))


if __name__ == "__main__":
    asyncio.run(main(msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Target)))
