"""Tells which protocols peers speak: run as a process of its own, without the daemon's libraries.

python -m tests.e2e.light_identify ADDRESS...
"""

import json
import sys

import trio
from libp2p import new_host
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.identity.identify.pb.identify_pb2 import Identify
from libp2p.peer.id import ID
from libp2p.utils.varint import read_length_prefixed_protobuf
from multiaddr import Multiaddr

IDENTIFY = "/ipfs/id/1.0.0"


async def main(addresses: list[str]) -> None:
    """Print the protocols that each peer announces, as JSON."""
    host = new_host(key_pair=create_new_key_pair())
    found = []
    async with host.run(listen_addrs=[]):
        for address in addresses:
            where, _, peer_id = address.rpartition("/p2p/")
            with trio.fail_after(20):
                await host.get_network().dial_addr(Multiaddr(where), ID.from_base58(peer_id))
                stream = await host.new_stream(ID.from_base58(peer_id), [IDENTIFY])
                said = Identify.FromString(await read_length_prefixed_protobuf(stream))
            found.append(sorted(said.protocols))
    print(json.dumps(found))


if __name__ == "__main__":
    trio.run(main, sys.argv[1:])
