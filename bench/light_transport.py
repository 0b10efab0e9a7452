"""What a hop costs without the daemon: py-libp2p beside the daemon and plain TCP, on loopback.

    python -m bench.light_transport [--light-python PYTHON] [--out FILE.json]

Each pair is two processes with the project's own framing: the round trip of a decode frame, the
throughput of prefill one way, and the processor time per megabyte of both sides, daemons included.
``--light-python`` is the interpreter of an environment with py-libp2p.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

from bench.local_swarm import ROOT
from bench.report import provenance, write
from bench.results_links import light_hop
from bench.transport import DECODE_BYTES, echo, measure, prefill, round_trips
from dht.command_line import loop_factory
from dht.connecting import connect
from dht.identity.peer_id import Identity
from dht.transport.config import TransportConfig, TransportKind
from dht.transport.interface import HOP_PROTOCOL

PAIRS = (("daemon", "daemon"), ("light", "daemon"), ("daemon", "light"), ("light", "light"))
"""Pairs of a sender of prefill and the receiver that echoes it."""
ROUNDS = 3


def config_of(kind: str, initial_peers: tuple[str, ...] = ()) -> TransportConfig:
    """A peer on loopback."""
    return TransportConfig(
        identity=Identity.generate(),
        kind=TransportKind(kind),
        host="127.0.0.1",
        initial_peers=initial_peers,
    )


async def serve(kind: str, founder: str) -> None:
    """Print an address and echo until stdin closes."""
    transport = await connect(config_of(kind, (founder,) if founder else ()))
    await transport.serve(HOP_PROTOCOL, echo)
    print(transport.addresses[0], flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await transport.close()


async def ask(kind: str, founder: str, address: str, pid: int) -> None:
    """Measure from this side and print the figures."""
    transport = await connect(config_of(kind, (founder,)))
    try:
        peer_id = address.rsplit("/", 1)[1]
        stream = await transport.open_stream(peer_id, HOP_PROTOCOL, addresses=(address,))
        found: dict[str, float] = {}
        for size_bytes in DECODE_BYTES:
            took = await round_trips(stream, size_bytes)
            found[f"round_trip_{size_bytes >> 10}_kib_ms"] = statistics.median(took) * 1e3
        print(json.dumps(found | await prefill(stream, psutil.Process(pid))), flush=True)
        await stream.close()
    finally:
        await transport.close()


def start(python: str, *arguments: str) -> "subprocess.Popen[str]":
    """One side of a pair."""
    return subprocess.Popen(
        [python, "-m", "bench.light_transport", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )


def measure_pair(sender: str, receiver: str, founder: str, light_python: str) -> dict[str, float]:
    """One run of one pair."""
    pythons = {"daemon": sys.executable, "light": light_python}
    server = start(pythons[receiver], "--serve", receiver, "--founder", founder)
    assert server.stdout is not None
    assert server.stdin is not None
    try:
        address = server.stdout.readline().strip()
        side = ("--ask", sender, "--founder", founder, "--address", address)
        client = start(pythons[sender], *side, "--pid", str(server.pid))
        written, _ = client.communicate(timeout=120)
        if client.returncode:
            raise RuntimeError(f"{sender} to {receiver}: exit code {client.returncode}")
        found: dict[str, float] = json.loads(written)
        return found
    finally:
        server.stdin.close()
        server.wait(20)


def compare(light_python: str) -> dict[str, Any]:
    """All pairs and plain TCP, round by round; medians over the rounds."""
    founder = start(sys.executable, "--serve", "daemon")
    assert founder.stdout is not None
    assert founder.stdin is not None
    rounds: dict[str, list[dict[str, float]]] = {"tcp": []}
    try:
        address = founder.stdout.readline().strip()
        for _ in range(ROUNDS):
            with asyncio.Runner(loop_factory=loop_factory()) as runner:
                rounds["tcp"].append(runner.run(measure("tcp")))
            for sender, receiver in PAIRS:
                found = measure_pair(sender, receiver, address, light_python)
                rounds.setdefault(f"{sender}_to_{receiver}", []).append(found)
    finally:
        founder.stdin.close()
        founder.wait(20)
    medians = {
        pair: {name: statistics.median(one[name] for one in found) for name in found[0]}
        for pair, found in rounds.items()
    }
    return {"medians": medians, "rounds": rounds}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.light_transport",
        description="What a hop costs over py-libp2p, beside the daemon and plain TCP.",
    )
    parser.add_argument("--out", type=Path, help="write the figures here as JSON")
    parser.add_argument("--light-python", default=sys.executable, help="has py-libp2p")
    for name in ("serve", "ask", "founder", "address"):
        parser.add_argument(f"--{name}", default="", help=argparse.SUPPRESS)
    parser.add_argument("--pid", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    kind = arguments.serve or arguments.ask
    if kind:
        work = (
            serve(kind, arguments.founder)
            if arguments.serve
            else ask(kind, arguments.founder, arguments.address, arguments.pid)
        )
        with asyncio.Runner(loop_factory=loop_factory(TransportKind(kind))) as runner:
            runner.run(work)
        return
    result = compare(arguments.light_python)
    print(light_hop(result))
    if arguments.out:
        made = {**provenance(seed=0), "command": "python -m bench.light_transport"}
        write(arguments.out, {**result, "provenance": made})


if __name__ == "__main__":
    main()
