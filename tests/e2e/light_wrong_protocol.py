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
from dht.transport.interface import HOP_PROTOCOL, RECORDS_PROTOCOL
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


async def go_in_turn(
    evil: LightTransport, target: Target, ways: list[tuple[int, Way]]
) -> list[tuple[str, str]]:
    """Go several ways one after the other; returns each one's name and what was wrong."""
    return [(way.name, await go(evil, target, number, way)) for number, way in ways]


async def main(target: Target) -> None:
    near = target.addresses[target.route[0].peer_id]
    evil = await LightTransport.create(
        TransportConfig(identity=Identity.generate(), host="127.0.0.1", initial_peers=near)
    )
    try:
        await evil.serve(HOP_PROTOCOL, ended)
        lanes: dict[int, list[tuple[int, Way]]] = {}
        for number, way in enumerate(QUICK_WAYS):
            # A peer has few streams for records at once: more are closed unheard.
            lane = -1 if way.protocol == RECORDS_PROTOCOL else number
            lanes.setdefault(lane, []).append((number, way))
        said = await asyncio.gather(*(go_in_turn(evil, target, ways) for ways in lanes.values()))
    finally:
        await evil.close()
    print(json.dumps({name: why for lane in said for name, why in lane if why}))


if __name__ == "__main__":
    asyncio.run(main(msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Target)))
