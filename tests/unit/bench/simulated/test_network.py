"""The in-memory network under the virtual clock."""

import asyncio
import contextlib
import random
from collections.abc import Coroutine
from typing import Any

import pytest

from dht.errors import NetworkError, PeerError
from dht.records.signed import RecordError
from dht.transport.interface import Stream, Transport
from dht.transport.streams import PIPES
from testing.clock import run_virtual
from testing.network import RETRY_S, LinkModel, MemoryNetwork, MemoryTransport

KEY = "net/model/nodes"
ECHO = "/test/echo/1"


def virtual(coro: Coroutine[Any, Any, None], limit_s: float = 1000.0) -> None:
    run_virtual(coro, limit_s=limit_s)


def elapsed() -> float:
    return asyncio.get_running_loop().time()


async def echo(stream: Stream) -> None:
    while True:
        stream.write(await stream.read_exactly(1))
        await stream.drain()


async def echoing(network: MemoryNetwork, count: int = 2) -> list[MemoryTransport]:
    peers = [network.transport() for _ in range(count)]
    for peer in peers:
        await peer.serve(ECHO, echo)
    return peers


def test_it_is_a_transport() -> None:
    async def body() -> None:
        peer: Transport = MemoryNetwork(random.Random(1)).transport()
        assert peer.addresses[0].endswith(f"/p2p/{peer.peer_id}")
        await peer.close()
        await peer.close()
        with pytest.raises(NetworkError, match="left"):
            await peer.get(KEY)

    virtual(body())


def test_the_same_seed_gives_the_same_peers() -> None:
    async def body() -> None:
        ids = {MemoryNetwork(random.Random(7)).transport().peer_id for _ in range(2)}
        assert len(ids) == 1

    virtual(body())


def test_no_delay_takes_no_time() -> None:
    async def body() -> None:
        a, b = await echoing(MemoryNetwork(random.Random(1)))
        stream = await a.open_stream(b.peer_id, ECHO)
        assert stream.remote_peer_id == b.peer_id
        stream.write(b"hello")
        await stream.drain()
        assert await stream.read_exactly(5) == b"hello"
        assert elapsed() == 0
        await stream.close()
        await stream.close()
        with pytest.raises(NetworkError):
            await stream.read_exactly(1)
        with pytest.raises(NetworkError):
            await stream.drain()
        await asyncio.sleep(1)
        assert b.stream_errors == {"NetworkError": 1}

    virtual(body())


def test_delay_and_bandwidth_of_each_direction() -> None:
    async def body() -> None:
        network = MemoryNetwork(random.Random(1))
        a, b = await echoing(network)
        network.set_link(a.peer_id, b.peer_id, LinkModel(delay_s=1.0))
        network.set_link(b.peer_id, a.peer_id, LinkModel(delay_s=2.0, bandwidth_bytes_per_s=10.0))
        stream = await a.open_stream(b.peer_id, ECHO)
        assert elapsed() == pytest.approx(3.0)
        stream.write(b"x" * 20)
        await stream.read_exactly(20)
        assert elapsed() == pytest.approx(3.0 + 1.0 + 2.0 + 2.0)

    virtual(body())


def test_loss_costs_time_but_no_bytes() -> None:
    async def body() -> None:
        network = MemoryNetwork(random.Random(1))
        a, b = await echoing(network)
        stream = await a.open_stream(b.peer_id, ECHO)
        network.link = LinkModel(loss=0.5)
        sent = bytes(range(100))
        for byte in sent:
            stream.write(bytes([byte]))
        assert await stream.read_exactly(100) == sent
        assert elapsed() > 20 * RETRY_S
        network.link = LinkModel(loss=1.0)
        with pytest.raises(NetworkError, match="did not answer"):
            await a.open_stream(b.peer_id, ECHO)

    virtual(body())


def test_a_slow_reader_holds_the_writer_back() -> None:
    async def body() -> None:
        network = MemoryNetwork(random.Random(1))
        a, b = network.transport(), network.transport()
        go = asyncio.Event()
        got = []

        async def read(stream: Stream) -> None:
            await go.wait()
            # More than the pipe holds, in one read.
            got.append(len(await stream.read_exactly(4 * PIPES.bytes_max)))

        await b.serve(ECHO, read)
        stream = await a.open_stream(b.peer_id, ECHO)
        written = 0

        async def write() -> None:
            nonlocal written
            while written < 4 * PIPES.bytes_max:
                stream.write(bytes(1 << 14))
                written += 1 << 14
                await stream.drain()

        task = asyncio.create_task(write())
        await asyncio.sleep(1)
        assert written <= PIPES.bytes_max + (1 << 14)
        go.set()
        await task
        await asyncio.sleep(1)
        assert got == [4 * PIPES.bytes_max]

    virtual(body())


@pytest.mark.parametrize("breaks", [False, True])
def test_partitions(breaks: bool) -> None:
    async def body() -> None:
        network = MemoryNetwork(random.Random(1), link=LinkModel(delay_s=0.1))
        a, b, c = await echoing(network, 3)
        stream = await a.open_stream(b.peer_id, ECHO)
        await a.store(KEY, b"before", expires_unix_s=a.now() + 60)
        network.partition([a.peer_id], breaks=breaks)
        stream.write(b"x")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(5):
                if breaks:
                    with pytest.raises(NetworkError, match="cut"):
                        await stream.read_exactly(1)
                else:
                    await stream.read_exactly(1)
                    pytest.fail("nothing crosses a cut")
        with pytest.raises(NetworkError, match="did not answer"):
            await a.open_stream(b.peer_id, ECHO)
        await (await c.open_stream(b.peer_id, ECHO)).close()
        await a.store(KEY, b"during", expires_unix_s=a.now() + 60)
        assert await a.get(KEY) == {a.peer_id: b"during"}
        assert await b.get(KEY) == {a.peer_id: b"before"}
        network.heal()
        assert await b.get(KEY) == {a.peer_id: b"during"}
        if not breaks:
            async with asyncio.timeout(1):
                assert await stream.read_exactly(1) == b"x"
        await (await a.open_stream(b.peer_id, ECHO)).close()

    virtual(body())


def test_freeze_is_silent_and_kill_breaks() -> None:
    async def body() -> None:
        network = MemoryNetwork(random.Random(1))
        a, b, c = await echoing(network, 3)
        stream = await a.open_stream(b.peer_id, ECHO)
        network.freeze(b.peer_id)
        stream.write(b"x")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(30):
                await stream.read_exactly(1)
        network.thaw(b.peer_id)
        assert await stream.read_exactly(1) == b"x"
        waiting = asyncio.create_task(stream.read_exactly(1))
        other = await a.open_stream(c.peer_id, ECHO)
        await asyncio.sleep(0)
        network.kill(b.peer_id)
        with pytest.raises(NetworkError, match="gone"):
            await waiting
        with pytest.raises(NetworkError, match="cannot be reached"):
            await a.open_stream(b.peer_id, ECHO)
        other.write(b"y")
        assert await other.read_exactly(1) == b"y"

    virtual(body())


def test_streams_to_oneself_and_to_no_handler() -> None:
    async def body() -> None:
        a, b = await echoing(MemoryNetwork(random.Random(1)))
        stream = await a.open_stream(a.peer_id, ECHO)
        stream.write(b"me")
        assert await stream.read_exactly(2) == b"me"
        for peer in (a, b):
            with pytest.raises(NetworkError, match="does not serve"):
                await a.open_stream(peer.peer_id, "/nothing/1")

    virtual(body())


def test_handlers_fail_alone(caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        network = MemoryNetwork(random.Random(1))
        a, b = network.transport(), network.transport()
        errors = [PeerError("bad"), ValueError("ours"), TimeoutError()]

        async def fail(stream: Stream) -> None:
            raise errors.pop()

        await b.serve(ECHO, fail)
        while errors:
            stream = await a.open_stream(b.peer_id, ECHO)
            with pytest.raises(NetworkError):
                await stream.read_exactly(1)
        assert b.stream_errors == {"PeerError": 1, "ValueError": 1, "TimeoutError": 1}

    virtual(body())
    assert [r.exc_info[0] for r in caplog.records if r.exc_info] == [ValueError]


@pytest.mark.parametrize("stays", [True, False])
def test_who_has_said_its_word_stays_until_it_is_heard(stays: bool) -> None:
    async def body() -> None:
        network = MemoryNetwork(random.Random(1), link=LinkModel(delay_s=1.0))
        a, b = network.transport(), network.transport()

        async def say(stream: Stream) -> None:
            stream.write(b"word")
            if not stays:
                await stream.close()

        await b.serve(ECHO, say)
        stream = await a.open_stream(b.peer_id, ECHO)
        opened_s = elapsed()
        stream.write(b"what nobody reads")
        assert await stream.read_exactly(4) == b"word"
        with pytest.raises(NetworkError, match="closed"):
            await stream.read_exactly(1)
        assert elapsed() - opened_s == pytest.approx(1.0 + (PIPES.heard_limit_s if stays else 0.0))
        heard = await a.open_stream(b.peer_id, ECHO)
        await heard.read_exactly(4)
        await heard.close()
        await asyncio.sleep(1.5)
        assert not b.handlers._tasks, "it waits though the other side has closed"

    virtual(body())


def test_who_has_said_its_word_does_not_listen_for_ever() -> None:
    async def body() -> None:
        network = MemoryNetwork(random.Random(1))
        a, b = network.transport(), network.transport()

        async def say(stream: Stream) -> None:
            stream.write(b"word")

        await b.serve(ECHO, say)
        stream = await a.open_stream(b.peer_id, ECHO)
        with contextlib.suppress(NetworkError):
            while elapsed() < PIPES.heard_limit_s:
                stream.write(bytes(64 << 10))
                await stream.drain()
                await asyncio.sleep(0.1)
        assert elapsed() < PIPES.heard_limit_s / 2

    virtual(body())


def test_records_expire_and_the_newest_wins() -> None:
    async def body() -> None:
        network = MemoryNetwork(random.Random(1))
        a, b = network.transport(), network.transport()
        assert await a.get(KEY) == {}
        assert await a.store(KEY, b"1", expires_unix_s=a.now() + 60)
        assert await b.store(KEY, b"2", expires_unix_s=b.now() + 30)
        assert await a.store(KEY, b"3", expires_unix_s=a.now() + 60)  # in the same instant
        assert await b.get(KEY) == {a.peer_id: b"3", b.peer_id: b"2"}
        await asyncio.sleep(31)
        assert await b.get(KEY) == {a.peer_id: b"3"}
        await asyncio.sleep(30)
        assert await b.get(KEY) == {}
        assert not await a.store(KEY, b"4", expires_unix_s=a.now() + 1e6)
        with pytest.raises(RecordError):
            await a.store("net/model/other", b"", expires_unix_s=a.now() + 1)

    virtual(body())


def test_stale_and_lost_reads() -> None:
    async def body() -> None:
        network = MemoryNetwork(random.Random(1), dht_stale_s=10.0)
        a, b = network.transport(), network.transport()
        await a.store(KEY, b"0", expires_unix_s=a.now() + 60)
        await asyncio.sleep(10)
        seen = []
        await a.store(KEY, b"1", expires_unix_s=a.now() + 60)
        for _ in range(12):
            seen.append((await b.get(KEY))[a.peer_id])
            await asyncio.sleep(1)
        assert seen[0] == b"0"
        assert seen[-1] == b"1"
        assert seen == sorted(seen)  # never back to what is older
        network.dht_loss = 1.0
        assert not await a.store(KEY, b"2", expires_unix_s=a.now() + 60)
        assert (await b.get(KEY))[a.peer_id] == b"1"

    virtual(body())


def test_many_peers_need_little_time() -> None:
    async def body() -> None:
        network = MemoryNetwork(random.Random(1), link=LinkModel(delay_s=0.05))
        peers = await echoing(network, 20)
        client = network.transport()

        async def visit(peer: MemoryTransport) -> None:
            stream = await client.open_stream(peer.peer_id, ECHO)
            for _ in range(20):
                stream.write(b"x")
                await stream.read_exactly(1)
            await stream.close()

        async with asyncio.TaskGroup() as group:
            for peer in peers:
                group.create_task(visit(peer))
        assert elapsed() == pytest.approx(21 * 0.1)
        await asyncio.gather(*(peer.close() for peer in peers))

    virtual(body())
