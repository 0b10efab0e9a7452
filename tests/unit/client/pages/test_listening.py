"""Listening for HTTP: where somebody else listens already, and for those who take nothing."""

import asyncio
import socket
from contextlib import ExitStack, suppress
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from client.pages import listening
from client.pages.listening import ListeningConfig, PageRunner, close_idle, listen, runner_of
from dht.errors import UserError
from dht.process.supervision import end_all
from tests.unit.client.gateway.waiting import until


def test_an_address_in_use_is_named_once() -> None:
    async def second(port: int) -> None:
        runner = runner_of(web.Application(), keepalive_s=1.0)
        await runner.setup()
        try:
            await listen(runner, "127.0.0.1", port)
        finally:
            await runner.cleanup()

    with socket.create_server(("127.0.0.1", 0)) as first:
        port = first.getsockname()[1]
        with pytest.raises(UserError) as refused:
            asyncio.run(second(port))
    said = str(refused.value)
    assert said.startswith(f"cannot listen at 127.0.0.1 port {port}: ")
    assert said.endswith("address already in use; choose another with --host and --port")
    assert said.count("127.0.0.1") == 1


@pytest.mark.parametrize("asks", [b"", b"GET / HTTP/1.1\r\n", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"])
async def test_who_asks_for_nothing_or_takes_nothing_is_closed(asks: bytes) -> None:
    """200 connections whose pages nobody took held 430 MB for ever."""

    async def page(_: web.Request) -> web.Response:
        return web.Response(body=bytes(16 << 20))

    app = web.Application()
    app.add_routes([web.get("/", page)])
    runner = runner_of(app, keepalive_s=60.0)
    await runner.setup()
    server = runner.server
    assert server is not None
    closing = asyncio.create_task(close_idle(server, 0.2))
    try:
        port = await listen(runner, "127.0.0.1", 0)
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(asks)
            await until(lambda: bool(server.connections))
            await until(lambda: not server.connections)
    finally:
        await end_all((closing,))
        await runner.cleanup()


async def test_a_crowd_of_one_address_costs_its_own_connections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A page held 2 MB for each connection of any number that read nothing."""
    monkeypatch.setattr(listening, "LISTENING", ListeningConfig(connections_max=8))
    runner = runner_of(web.Application(), keepalive_s=60.0, kind=PageRunner)
    await runner.setup()
    server = runner.server
    assert server is not None
    try:
        port = await listen(runner, "127.0.0.1", 0)
        with ExitStack() as stack:

            def connect(address: str) -> socket.socket:
                here = (address, 0)
                return stack.enter_context(
                    socket.create_connection(("127.0.0.1", port), source_address=here)
                )

            visitors = [connect("127.0.0.2"), connect("127.0.0.3")]
            await until(lambda: len(server.connections) == 2)
            crowd = [connect("127.0.0.4") for _ in range(20)]
            newest = connect("127.0.0.5")
            for each in (*visitors, *crowd[-5:], newest):
                each.setblocking(False)
                await ask(each)
            await until(lambda: len(server.connections) == 8)
            with suppress(ConnectionError):
                assert crowd[0].recv(1) == b""
    finally:
        await runner.cleanup()


async def ask(connection: socket.socket) -> None:
    """Send a request and wait for the beginning of its answer."""
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(connection, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    assert await loop.sock_recv(connection, 4) == b"HTTP"


class Connection(SimpleNamespace):
    __hash__ = object.__hash__


@pytest.mark.virtual(limit_s=100)
async def test_who_goes_on_asking_is_not_closed() -> None:
    closed: list[None] = []
    transport = SimpleNamespace(abort=lambda: closed.append(None))
    asks = Connection(_request_count=0, transport=transport)
    server: Any = SimpleNamespace(connections=[asks])
    closing = asyncio.create_task(close_idle(server, 4.0))
    for _ in range(10):
        await asyncio.sleep(3.0)
        asks._request_count += 1
    assert not closed
    await asyncio.sleep(6.0)
    assert closed
    await end_all((closing,))
