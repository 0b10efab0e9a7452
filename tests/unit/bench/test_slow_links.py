"""Connections that are passed on late."""

import asyncio
import contextlib
import time

from bench.demo.slow_links import HOST, SlowLinks, free_port

ROUND_TRIP_S = 0.1


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1000):
        writer.write(data)
    writer.close()


def test_bytes_come_late_in_order_and_with_their_end() -> None:
    async def scenario(links: SlowLinks) -> None:
        server = await asyncio.start_server(echo, HOST, 0)
        port = links.before(server.sockets[0].getsockname()[1])
        reader, writer = await asyncio.open_connection(HOST, port)
        begun_s = time.monotonic()
        sent = bytes(range(256)) * 1000
        writer.write(sent)
        assert await reader.readexactly(len(sent)) == sent
        assert time.monotonic() - begun_s >= ROUND_TRIP_S
        writer.close()
        server.close()
        nobody, gone = await asyncio.open_connection(HOST, links.before(free_port()))
        assert await nobody.read() == b"", "nobody listens there"
        gone.close()

    with SlowLinks(ROUND_TRIP_S) as links:
        asyncio.run(scenario(links))


async def test_a_free_port_can_be_listened_at() -> None:
    server = await asyncio.start_server(echo, HOST, free_port())
    server.close()


async def test_it_ends_while_connections_are_open() -> None:
    server = await asyncio.start_server(echo, HOST, 0)
    with SlowLinks(ROUND_TRIP_S) as links:
        port = links.before(server.sockets[0].getsockname()[1])
        reader, writer = await asyncio.open_connection(HOST, port)
        writer.write(b"x")
        assert await reader.readexactly(1) == b"x"
    with contextlib.suppress(ConnectionResetError):
        assert await reader.read() == b""
    writer.close()
    server.close()
    assert not links._thread.is_alive()
