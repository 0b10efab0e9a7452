"""Listening for HTTP where somebody else listens already."""

import asyncio
import socket

import pytest
from aiohttp import web

from client.pages.listening import listen, runner_of
from dht.errors import UserError


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
