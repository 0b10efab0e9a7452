"""What a hop costs: frames over the p2p daemon beside the same frames over plain TCP, on loopback.

    python -m bench.transport [--out bench/results/transport.json]

All in one run, each between two processes with the project's own framing: the round trip of a
decode frame, the throughput of prefill, and the processor time per megabyte, daemons included.
Between the two stands *relayed*: the same TCP through two relays with a cipher between them
(:mod:`bench.relay`), which is what any daemon on either side must do.
"""

import argparse
import asyncio
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil

from bench.local_swarm import ROOT
from bench.relay import relay
from bench.report import provenance, write
from bench.results_links import hop
from dht.command_line import loop_factory
from dht.errors import NetworkError
from dht.messages import codec
from dht.messages.session import Ping, Pong
from dht.transport.interface import HOP_PROTOCOL, Stream

DECODE_BYTES = (4 << 10, 16 << 10)
"""One row of 1024 float32 numbers, and of 8192 bfloat16 ones."""
ROUND_TRIPS = 400
PREFILL_FRAME_BYTES = 512 << 10
PREFILL_BYTES = 192 << 20
ROUNDS = 3
KINDS = ("tcp", "relayed", "p2p")


class TcpStream:
    """asyncio's TCP under the project's stream interface."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self.remote_peer_id = "tcp"

    async def read_exactly(self, count: int) -> bytes:
        try:
            return await self._reader.readexactly(count)
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise NetworkError(str(error)) from error

    def write(self, data: bytes) -> None:
        self._writer.write(data)

    async def drain(self) -> None:
        await self._writer.drain()

    async def close(self) -> None:
        self._writer.close()


async def echo(stream: Stream) -> None:
    """Answer a ping with a body by the same body, one without a body by a pong alone."""
    with_body = True
    while True:
        frame = await codec.read_frame(stream)
        with_body = frame.message.nonce != 0
        if with_body:
            await codec.send_frame(stream, Pong(nonce=1), frame.body)
        elif len(frame.body) == 0:
            await codec.send_frame(stream, Pong(nonce=0))


async def serve(kind: str) -> None:
    """Print an address and echo until stdin closes."""
    if kind in ("tcp", "relayed"):

        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                await echo(TcpStream(reader, writer))
            except (NetworkError, asyncio.CancelledError):
                writer.close()

        server = await asyncio.start_server(handle, "127.0.0.1", 0, limit=1 << 20)
        port = server.sockets[0].getsockname()[1]
        if kind == "relayed":
            with relay("open", port) as relay_port:
                print(relay_port, flush=True)
                await asyncio.to_thread(sys.stdin.read)
            return
        print(port, flush=True)
        await asyncio.to_thread(sys.stdin.read)
        return
    from dht.daemon.transport import HivemindTransport
    from dht.identity.peer_id import Identity
    from dht.transport.config import TransportConfig

    config = TransportConfig(identity=Identity.generate(), host="127.0.0.1")
    transport = await HivemindTransport.create(config)
    await transport.serve(HOP_PROTOCOL, echo)
    print(transport.addresses[0], flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await transport.close()


@asynccontextmanager
async def connected(kind: str, address: str) -> AsyncIterator[Stream]:
    """A stream to the server."""
    if kind == "relayed":
        with relay("seal", int(address)) as port:
            async with connected("tcp", str(port)) as stream:
                yield stream
        return
    if kind == "tcp":
        reader, writer = await asyncio.open_connection("127.0.0.1", int(address), limit=1 << 20)
        stream = TcpStream(reader, writer)
        yield stream
        await stream.close()
        return
    from dht.daemon.transport import HivemindTransport
    from dht.identity.peer_id import Identity
    from dht.transport.config import TransportConfig

    config = TransportConfig(
        identity=Identity.generate(), host="127.0.0.1", initial_peers=(address,)
    )
    transport = await HivemindTransport.create(config)
    try:
        yield await transport.open_stream(address.rsplit("/", 1)[1], HOP_PROTOCOL)
    finally:
        await transport.close()


def cpu_s(server: psutil.Process) -> float:
    """Processor time so far of both sides and their daemons."""
    total = 0.0
    for root in (psutil.Process(), server):
        for process in (root, *root.children(recursive=True)):
            try:
                times = process.cpu_times()
            except psutil.NoSuchProcess:
                continue
            total += times.user + times.system
    return total


async def round_trips(stream: Stream, size_bytes: int) -> list[float]:
    """Seconds of each round trip of a frame with a body of that size, there and back."""
    body = bytes(size_bytes)
    took = []
    for _ in range(ROUND_TRIPS):
        started_s = time.perf_counter()
        await codec.send_frame(stream, Ping(nonce=1), body)
        await codec.read_frame(stream)
        took.append(time.perf_counter() - started_s)
    return took[ROUND_TRIPS // 10 :]


async def prefill(stream: Stream, server: psutil.Process) -> dict[str, float]:
    """Throughput one way, and what it costs."""
    body = bytes(PREFILL_FRAME_BYTES)
    before_cpu_s, started_s = cpu_s(server), time.perf_counter()
    for _ in range(PREFILL_BYTES // PREFILL_FRAME_BYTES):
        await codec.send_frame(stream, Ping(nonce=0), body)
    await codec.send_frame(stream, Ping(nonce=0))
    await codec.read_frame(stream)
    took_s = time.perf_counter() - started_s
    return {
        "mb_per_s": PREFILL_BYTES / 1e6 / took_s,
        "cpu_ms_per_mb": (cpu_s(server) - before_cpu_s) * 1e3 / (PREFILL_BYTES / 1e6),
    }


def start_server(kind: str) -> "subprocess.Popen[str]":
    """The other process of a transport, which prints its address and ends with its stdin."""
    return subprocess.Popen(
        [sys.executable, "-m", "bench.transport", "--serve", kind],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )


async def measure(kind: str) -> dict[str, Any]:
    """All figures of one kind of transport."""
    process = start_server(kind)
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        address = process.stdout.readline().strip()
        found: dict[str, Any] = {}
        async with connected(kind, address) as stream:
            for size_bytes in DECODE_BYTES:
                took = await round_trips(stream, size_bytes)
                found[f"round_trip_{size_bytes >> 10}_kib_ms"] = statistics.median(took) * 1e3
            found |= await prefill(stream, psutil.Process(process.pid))
        return found
    finally:
        process.stdin.close()
        process.wait(20)


def compare() -> dict[str, Any]:
    """All kinds, round by round; medians over the rounds."""
    rounds: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    for _ in range(ROUNDS):
        for kind, found in rounds.items():
            found.append(_run(lambda kind=kind: measure(kind)))
    medians = {
        kind: {name: statistics.median(one[name] for one in found) for name in found[0]}
        for kind, found in rounds.items()
    }
    return {
        **medians,
        "p2p_costs_times": _costs_times(medians["p2p"], medians["tcp"]),
        "relayed_costs_times": _costs_times(medians["relayed"], medians["tcp"]),
        "rounds": rounds,
    }


def _costs_times(these: dict[str, float], those: dict[str, float]) -> dict[str, float]:
    """How many times as dear each figure is; of a throughput, how many times as slow."""
    return {
        name: raw / these[name] if name == "mb_per_s" else these[name] / raw
        for name, raw in those.items()
    }


def _run(work: Callable[[], Awaitable[Any]]) -> Any:
    async def wrapped() -> Any:
        return await work()

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(wrapped())


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.transport", description="What a hop costs beside plain TCP."
    )
    parser.add_argument("--out", type=Path, help="write the figures here as JSON")
    parser.add_argument("--serve", choices=KINDS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        _run(lambda: serve(arguments.serve))
        return
    result = compare()
    print(hop(result))
    if arguments.out:
        write(arguments.out, {**result, "provenance": provenance(seed=0)})


if __name__ == "__main__":
    main()
