"""A gateway behind nginx, by the recipe of docs/gateway.md, and whom it believes who asked."""

import asyncio
import re
import shutil
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from client.gateway.web.app import GatewayConfig
from client.gateway.web.callers import asked_by, party_of, proxies_of
from client.gateway.web.uploads import UploadsConfig
from dht.errors import UserError
from testing.paths import ROOT
from tests.unit.client.gateway.paper import paper_gateway
from tests.unit.client.gateway.waiting import until

PUBLIC = "chat.example.org"
BODY = {"prompt": "a", "max_tokens": 2}


def page(**more: str) -> dict[str, str]:
    return {"Origin": f"http://{PUBLIC}", **more}


@pytest.mark.parametrize(
    ("proxies", "forwarded", "status"),
    [
        ((), PUBLIC, 403),
        (("10.0.0.0/8",), PUBLIC, 403),
        (("127.0.0.1",), None, 403),
        (("127.0.0.1",), "other.example", 403),
        (("127.0.0.1",), f"{PUBLIC}, other.example", 403),
        (("127.0.0.1",), PUBLIC, 200),
        (("127.0.0.0/8", "::1"), f"spoofed.example, {PUBLIC}", 200),
    ],
)
async def test_a_proxy_that_the_owner_names_says_by_what_name_a_page_asked(
    proxies: tuple[str, ...], forwarded: str | None, status: int
) -> None:
    config = GatewayConfig(hosts=frozenset({PUBLIC}), proxies=proxies_of(proxies))
    async with paper_gateway(config=config) as gateway:
        headers = page() if forwarded is None else page(**{"X-Forwarded-Host": forwarded})
        async with gateway.http.post(
            gateway.url + "/v1/completions", json=BODY, headers=headers
        ) as response:
            assert response.status == status


async def test_addresses_behind_a_proxy_take_turns_of_their_own() -> None:
    config = GatewayConfig(proxies=proxies_of(["127.0.0.1"]), answers_at_once_max=4, requests_max=8)
    async with paper_gateway(config=config) as gateway:
        gate = gateway.swarm.gate = asyncio.Event()

        async def ask(address: str) -> int:
            async with gateway.http.post(
                gateway.url + "/v1/completions",
                json=BODY,
                headers={"X-Forwarded-For": f"1.2.3.4, {address}"},
            ) as response:
                await response.read()
                return response.status

        # One network of IPv6 is one who asks.
        crowd = [asyncio.create_task(ask(f"2001:db8::{at}")) for at in range(8)]
        await until(lambda: gateway.answers.requests == 8 and gateway.swarm.live == 3)
        other = asyncio.create_task(ask("192.0.2.7"))
        await until(lambda: gateway.swarm.live == 4)
        gate.set()
        assert await asyncio.gather(other, *crowd) == [200] * 9


@pytest.mark.parametrize(
    ("remote", "forwarded", "party"),
    [
        ("192.0.2.7", ["198.51.100.1"], "192.0.2.7"),
        ("10.0.0.1", ["198.51.100.1", "192.0.2.7"], "192.0.2.7"),
        ("10.0.0.1", ["198.51.100.1", "192.0.2.7", "10.0.0.2"], "192.0.2.7"),
        ("10.0.0.1", ["10.0.0.3", "10.0.0.2"], "10.0.0.3"),
        ("10.0.0.1", ["192.0.2.7:4711"], "192.0.2.7"),
        ("10.0.0.1", ["[2001:db8::7]:4711"], "2001:db8::/64"),
        ("10.0.0.1", ["::ffff:192.0.2.7"], "192.0.2.7"),
        ("::ffff:10.0.0.1", ["192.0.2.7"], "192.0.2.7"),
        ("10.0.0.1", ["192.0.2.7", "unknown"], "unknown"),
        ("10.0.0.1", [], "10.0.0.1"),
        ("", ["192.0.2.7"], ""),
    ],
)
def test_who_asks_is_the_nearest_address_that_is_no_proxy(
    remote: str, forwarded: list[str], party: str
) -> None:
    assert party_of(asked_by(remote, forwarded, proxies_of(["10.0.0.0/8"]))) == party


def test_unfinished_requests_of_one_network_are_counted_together() -> None:
    async def scenario() -> list[int]:
        config = GatewayConfig(
            proxies=proxies_of(["127.0.0.1"]), uploads=UploadsConfig(per_address_max=2)
        )
        async with paper_gateway(config=config) as gateway:
            ended = asyncio.Event()

            async def body() -> AsyncIterator[bytes]:
                yield b"{"
                await ended.wait()
                yield b"}"

            async def ask(at: int) -> int:
                async with gateway.http.post(
                    gateway.url + "/v1/completions",
                    data=body(),
                    headers={
                        "Content-Type": "application/json",
                        "X-Forwarded-For": f"2001:db8::{at}",
                    },
                ) as response:
                    return response.status

            asked = [asyncio.create_task(ask(at)) for at in range(3)]
            first, _ = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
            ended.set()
            await asyncio.wait(asked)
            return [each.result() for each in first]

    assert asyncio.run(scenario()) == [429]


def test_a_proxy_is_an_address() -> None:
    with pytest.raises(UserError, match="--proxy"):
        proxies_of(["proxy.example"])


def recipe() -> str:
    """The server of docs/gateway.md."""
    text = (ROOT / "docs" / "gateway.md").read_text()
    found = re.search(r"```nginx\n(.*?)```", text, re.DOTALL)
    assert found is not None
    return found[1]


async def test_the_recipe_for_nginx_lets_the_page_ask_and_streams(tmp_path: Path) -> None:
    nginx = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if nginx is None:
        pytest.skip("nginx is not installed")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config = GatewayConfig(
        hosts=frozenset({PUBLIC}),
        proxies=proxies_of(["127.0.0.1"]),
        silent_s=0.05,
        beat_s=0.05,
    )
    async with paper_gateway(config=config) as gateway:
        server = recipe().replace("http://127.0.0.1:8000", gateway.url)
        server = re.sub(r"listen .*", f"listen 127.0.0.1:{port};", server)
        server = re.sub(r"\s*ssl_certificate.*", "", server)
        temporary = " ".join(
            f"{name}_temp_path {tmp_path}/{name};"
            for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        )
        (tmp_path / "nginx.conf").write_text(
            f"daemon off; pid {tmp_path}/pid; error_log stderr; events {{}}\n"
            f"http {{ access_log off; {temporary}\n{server} }}\n"
        )
        process = await asyncio.create_subprocess_exec(
            nginx, "-e", "stderr", "-p", str(tmp_path), "-c", str(tmp_path / "nginx.conf"),
            stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        try:
            url = f"http://127.0.0.1:{port}"
            host = {"Host": PUBLIC}
            async with aiohttp.ClientSession() as http, asyncio.timeout(30):
                while True:
                    try:
                        async with http.get(url + "/", headers=host) as response:
                            assert response.status == 200
                            break
                    except aiohttp.ClientConnectionError:
                        await asyncio.sleep(0.02)
                gate = gateway.swarm.gate = asyncio.Event()
                async with http.post(
                    url + "/v1/completions", json={**BODY, "stream": True}, headers=page(**host)
                ) as response:
                    assert response.status == 200
                    # It comes while nothing is answered yet: nothing is held back on the way.
                    assert (await response.content.readline()).startswith(b": ")
                    gate.set()
                    assert b"[DONE]" in await response.read()
        finally:
            process.terminate()
            await process.wait()
