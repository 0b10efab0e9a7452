"""Whether a swarm knows its links: measured bandwidth and round trip beside the truth.

    sudo python -m bench.speed.links [--out bench/results/links.json]

Five real peers in network namespaces, joined by links of set rates and delays, each direction its
own (:mod:`testing.wan_lab`). They measure their links when they join; what is compared is what
anybody reads from the DHT.
"""

import argparse
import asyncio
import itertools
import json
import random
import subprocess
import sys
import time
from typing import Any

from bench.report import parser_of, provenance, table, write
from testing.local_swarm import ROOT, LocalSwarm
from testing.reference import memory_for
from testing.wan_lab import Shape, WanLab, why_not

MODEL = ROOT / "models" / "brook"
PEERS = 5
WAIT_S = 240.0
RATES_MBIT = (10, 20, 50, 100)
DELAYS_MS = (5, 10, 20, 40)
NETWORK = "anabranch"


def shapes(seed: int) -> dict[tuple[int, int], Shape]:
    """A rate for each direction; the delay is the same both ways."""
    rng = random.Random(seed)
    found = {}
    for one, other in itertools.combinations(range(PEERS), 2):
        delay_ms = rng.choice(DELAYS_MS)
        for pair in ((one, other), (other, one)):
            found[pair] = Shape(mbit=rng.choice(RATES_MBIT), delay_ms=delay_ms)
    return found


async def read(addresses: list[str], peers: int) -> list[dict[str, Any]]:
    """All links that the DHT knows, once every peer has announced one from each other."""
    from dht.messages.types import model_key
    from dht.networks.connecting import observe
    from dht.records.directory import Directory

    transport = await observe(addresses)
    try:
        directory = Directory(transport, NETWORK, model_key(MODEL.name))
        until_s = time.monotonic() + WAIT_S
        while time.monotonic() < until_s:
            records = await directory.links()
            links = [
                link
                for author, record in records.items()
                for link in record.links
                if link.target == author
            ]
            if len(links) >= peers * (peers - 1):
                return [
                    {
                        "source": link.source,
                        "target": link.target,
                        "mbit": link.bandwidth_bytes_per_s / 125_000,
                        "rtt_ms": link.rtt_s * 1e3,
                    }
                    for link in links
                ]
            await asyncio.sleep(2)
        raise SystemExit(f"only {len(links)} links were announced in {WAIT_S:.0f} s")
    finally:
        await transport.close()


def measure(seed: int) -> list[dict[str, Any]]:
    """One row per directed link: truth, measurement, errors."""
    truth = shapes(seed)
    fast = Shape(mbit=1000, delay_ms=0.1)
    with WanLab(PEERS + 1, fast) as lab:  # the last host is the reader
        for (source, target), shape in truth.items():
            lab.shape(source, target, shape)
        memory_gib = 0.5 * memory_for(MODEL) / 2**30
        with LocalSwarm(MODEL, extra=("--threads", "1")) as swarm:
            for host in range(PEERS):
                swarm.start_peer(
                    memory_gib=memory_gib,
                    host=lab.address(host),
                    run_on=lab.command(host, ()),
                )
            hosts = {peer.peer_id: index for index, peer in enumerate(swarm.peers)}
            reader = lab.command(
                PEERS, [sys.executable, "-m", "bench.speed.links", "--read", *swarm.addresses[:2]]
            )
            done = subprocess.run(reader, cwd=ROOT, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise SystemExit(done.stderr[-2000:])
    rows = []
    for link in json.loads(done.stdout):
        source, target = hosts[link["source"]], hosts[link["target"]]
        shape, back = truth[source, target], truth[target, source]
        rtt_ms = shape.delay_ms + back.delay_ms
        rows.append(
            {
                "source": source,
                "target": target,
                "truth_mbit": shape.mbit,
                "mbit": link["mbit"],
                "truth_rtt_ms": rtt_ms,
                "rtt_ms": link["rtt_ms"],
                "bandwidth_error": link["mbit"] / shape.mbit - 1,
                "rtt_error": link["rtt_ms"] / rtt_ms - 1,
            }
        )
    return sorted(rows, key=lambda row: (row["source"], row["target"]))


def main() -> None:
    parser = parser_of("bench.speed.links", "Measured links beside the truth; needs root.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--read", nargs="+", metavar="ADDR", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.read:
        print(json.dumps(asyncio.run(read(arguments.read, PEERS))))
        return
    if (reason := why_not()) is not None:
        raise SystemExit(f"error: {reason}")
    rows = measure(arguments.seed)
    print(
        table(
            "link | Mbit/s | measured | error | round trip ms | measured | error",
            "{source} → {target} | {truth_mbit} | {mbit:.1f} | {bandwidth_error:+.0%}"
            " | {truth_rtt_ms:.0f} | {rtt_ms:.1f} | {rtt_error:+.0%}",
            rows,
        )
    )
    if arguments.out:
        write(
            arguments.out,
            {
                "what": "links as read from the DHT of five real peers in network namespaces",
                "bandwidth_error_max": max(abs(row["bandwidth_error"]) for row in rows),
                "rtt_error_max": max(abs(row["rtt_error"]) for row in rows),
                "links": rows,
                "provenance": provenance(seed=arguments.seed),
            },
        )


if __name__ == "__main__":
    main()
