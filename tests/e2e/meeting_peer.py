"""A peer of the transport alone, for faults: it announces itself for a few seconds at a time.

``python -m tests.e2e.meeting_peer PORT [ADDRESS…]`` prints a line with its address, and then the
ids of the peers that it knows whenever those change; it ends with its standard input.
"""

import asyncio
import contextlib
import sys

from dht.daemon.transport import HivemindTransport
from dht.errors import NetworkError
from dht.identity.peer_id import Identity
from dht.messages import codec
from dht.transport.config import TransportConfig
from tests.unit.records import record_of

KEY = "test/model/nodes"
LIVES_S = 6.0
"""Short, so that a cut need not last for a minute before each side knows only itself."""


async def _announce(transport: HivemindTransport) -> None:
    known: list[str] = []
    while True:
        record = record_of(transport.peer_id, 0, 8, addresses=transport.addresses)
        until_s = transport.now() + LIVES_S
        with contextlib.suppress(NetworkError, TimeoutError):
            await transport.store(KEY, codec.encode(record), expires_unix_s=until_s)
            seen = sorted(await transport.get(KEY))
            if seen != known:
                known = seen
                print(" ".join(known), flush=True)
        await asyncio.sleep(0.5)


async def _run(port: int, initial: tuple[str, ...]) -> None:
    config = TransportConfig(identity=Identity.generate(), port=port, initial_peers=initial)
    transport = await HivemindTransport.create(config)
    print(transport.addresses[0], flush=True)
    announcing = asyncio.create_task(_announce(transport))
    await asyncio.to_thread(sys.stdin.read)
    announcing.cancel()
    await transport.close()


if __name__ == "__main__":
    asyncio.run(_run(int(sys.argv[1]), tuple(sys.argv[2:])))
