"""``python -m bench.dht_flood``: 400,000 signed records against a peer while others join.

Several stock nodes store one-byte records, each signed by an identity of its own, at a peer in a
process of its own. Every tenth of the way an honest peer joins through it, from another process,
stores its record and looks whether the flooded peer gives it out. Writes the joins' seconds and the
peer's memory (its process and its daemon) beside what it was before.
"""

import argparse
import asyncio
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from bench import report
from bench.local_swarm import ROOT
from dht.daemon.transport import HivemindTransport
from dht.identity.peer_id import Identity
from dht.records.signed import sign_record
from dht.transport.config import TransportConfig

KEY = "bench/model/nodes"
BATCH = 100
JOINS = 10
JOIN_LIMIT_S = 60.0


async def victim() -> None:
    """The flooded peer: prints its address and id, and stays until it is killed."""
    peer = await HivemindTransport.create(
        TransportConfig(identity=Identity.generate(), host="127.0.0.1")
    )
    print(peer.addresses[0], peer.peer_id, flush=True)
    await asyncio.Event().wait()


def memory_bytes(pid: int) -> int:
    """Resident bytes of a process and its children."""
    process = psutil.Process(pid)
    return sum(p.memory_info().rss for p in (process, *process.children(recursive=True)))


async def join(address: str) -> float | None:
    """An honest peer's join, in a process of its own: this one is busy with the flood."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "bench.dht_flood",
        "--join",
        address,
        stdout=asyncio.subprocess.PIPE,
    )
    out, _ = await process.communicate()
    told = out.decode().split()
    return float(told[-1]) if process.returncode == 0 and told else None


async def join_here(address: str) -> float | None:
    """Seconds until a newcomer is in and its record is given out; None if it fails."""
    started_s = time.perf_counter()
    try:
        async with asyncio.timeout(JOIN_LIMIT_S):
            peer = await HivemindTransport.create(
                TransportConfig(
                    identity=Identity.generate(), host="127.0.0.1", initial_peers=(address,)
                )
            )
            try:
                stored = await peer.store(KEY, b"me", expires_unix_s=peer.now() + 60)
                found = peer.peer_id in await peer.get(KEY)
            finally:
                await peer.close()
    except Exception as error:  # noqa: BLE001  (whatever keeps a peer out is counted)
        print(f"join failed: {type(error).__name__}: {error}", flush=True)
        return None
    return time.perf_counter() - started_s if stored and found else None


class Flood:
    """Stock nodes that store at the victim as fast as it answers."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.sent = self.taken = 0

    async def pour(self, node: Any, target: Any, numbers: range) -> None:
        """Records of identities with these numbers."""
        from hivemind.dht.routing import DHTID
        from hivemind.utils import MSGPackSerializer

        place = DHTID.generate(source=KEY)
        for first in range(numbers.start, numbers.stop, BATCH):
            expires_unix_s = time.time() + 90
            names, values = [], []
            for number in range(first, min(first + BATCH, numbers.stop)):
                fake = Identity((number + 1).to_bytes(32, "big"))
                names.append(fake.peer_id)
                values.append(MSGPackSerializer.dumps(sign_record(fake, KEY, b"x", expires_unix_s)))
            await asyncio.sleep(0)
            stored = await node.protocol.call_store(
                target, [place] * len(names), values, [expires_unix_s] * len(names), subkeys=names
            )
            self.sent += len(names)
            self.taken += sum(stored or ())


async def run(records: int, attackers: int, limit_s: float) -> dict[str, Any]:
    """The flood and the joins."""
    from hivemind.dht.node import DHTNode
    from hivemind.p2p import PeerID

    process = subprocess.Popen(  # noqa: ASYNC220  (once, at the start)
        [sys.executable, "-m", "bench.dht_flood", "--victim"], stdout=subprocess.PIPE, text=True
    )
    nodes = []
    try:
        assert process.stdout is not None
        address, peer_id = (await asyncio.to_thread(process.stdout.readline)).split()
        joins = [await join(address)]
        before = peak = memory_bytes(process.pid)
        own = ["/ip4/127.0.0.1/tcp/0"]
        while len(nodes) < attackers:
            nodes.append(await DHTNode.create(host_maddrs=own, initial_peers=[address]))
        flood, share = Flood(records), records // attackers
        started_s = time.perf_counter()
        pouring = [
            asyncio.create_task(
                flood.pour(n, PeerID.from_base58(peer_id), range(i * share, (i + 1) * share))
            )
            for i, n in enumerate(nodes)
        ]
        while not all(task.done() for task in pouring):
            if flood.sent >= len(joins) * records // JOINS:
                joins.append(await join(address))
            peak = max(peak, memory_bytes(process.pid))
            if time.perf_counter() - started_s > limit_s:
                for task in pouring:
                    task.cancel()
                break
            await asyncio.sleep(0.2)
        await asyncio.gather(*pouring, return_exceptions=True)
        joins.append(await join(address))
        peak = max(peak, memory_bytes(process.pid))
        return {
            "records": flood.sent,
            "wanted": records,
            "taken": flood.taken,
            "attackers": attackers,
            "flood_s": round(time.perf_counter() - started_s, 1),
            "join_s": [None if s is None else round(s, 2) for s in joins],
            "joins_failed": sum(s is None for s in joins),
            "memory_before_mib": round(before / 2**20, 1),
            "memory_added_mib": round((peak - before) / 2**20, 1),
        }
    finally:
        for node in nodes:
            await node.shutdown()
        process.kill()
        process.wait()


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(prog="python -m bench.dht_flood", description=__doc__)
    parser.add_argument("--records", type=int, default=400_000)
    parser.add_argument("--attackers", type=int, default=4)
    parser.add_argument("--limit", type=float, default=540.0, metavar="S", help="ends the flood")
    parser.add_argument("--victim", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--join", metavar="ADDRESS", help=argparse.SUPPRESS)
    parser.add_argument(
        "--output", type=Path, default=ROOT / "bench" / "results" / "dht_flood.json"
    )
    arguments = parser.parse_args(argv)
    if arguments.victim:
        asyncio.run(victim())
    if arguments.join:
        took_s = asyncio.run(join_here(arguments.join))
        print("failed" if took_s is None else took_s)
        return 1 if took_s is None else 0
    result = report.provenance(seed=0)
    result |= asyncio.run(run(arguments.records, arguments.attackers, arguments.limit))
    report.write(arguments.output, result)
    print({key: result[key] for key in ("records", "taken", "join_s", "memory_added_mib")})
    return 0


if __name__ == "__main__":
    sys.exit(main())
