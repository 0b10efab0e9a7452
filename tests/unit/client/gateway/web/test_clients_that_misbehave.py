"""Clients that hang up, send slowly, take nothing or never say anything: others are unaffected."""

import asyncio
import gc
import json
import threading
import weakref
import zlib
from dataclasses import replace
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

import client.gateway.__main__ as command
from client.gateway.answering.text_threads import THREADS
from client.gateway.errors import bad_request
from client.gateway.keys import Key, plain_keys
from client.gateway.web import app
from client.gateway.web.app import Gateway, GatewayConfig
from client.gateway.web.bodies import BODIES, BODY_BYTES
from client.gateway.web.callers import hosts_of
from client.gateway.web.uploads import UploadsConfig
from coordinator.policies.routing.affinity import Route
from coordinator.policies.routing.routes import NoRoute
from dht.errors import UserError
from tests.unit.client.gateway.paper import PaperGateway, paper_gateway
from tests.unit.client.gateway.waiting import until

TEXT = "/v1/completions"
JSON = "application/json"
LOCAL = (ip_network("127.0.0.0/8"),)


def raw_request(body: dict[str, object], *, length: int | None = None) -> bytes:
    data = json.dumps(body).encode()
    head = (
        f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data) if length is None else length}\r\n\r\n"
    )
    return head.encode() + data


async def connect(gateway: PaperGateway) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = gateway.url.removeprefix("http://").split(":")
    return await asyncio.open_connection(host, int(port))


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("n", [1, 3])
async def test_a_client_that_hangs_up_frees_its_sessions(streams: bool, n: int) -> None:
    async with paper_gateway(step_s=0.005) as gateway:
        body = {"prompt": [5], "max_tokens": 1000, "stream": streams, "n": n}
        reader, writer = await connect(gateway)
        writer.write(raw_request(body))
        await until(lambda: gateway.swarm.live == n)
        if streams:
            await reader.readuntil(b"data: ")
        writer.transport.abort()
        await until(lambda: gateway.swarm.live == 0)
        await until(lambda: gateway.answers.requests == 0)


async def test_one_that_hangs_up_while_it_waits_takes_no_turn() -> None:
    async with paper_gateway(config=GatewayConfig(answers_at_once_max=1)) as gateway:
        gateway.swarm.gate = asyncio.Event()
        first = asyncio.create_task(gateway.post(TEXT, prompt=[5], max_tokens=2))
        await until(lambda: gateway.swarm.live == 1)
        _, writer = await connect(gateway)
        writer.write(raw_request({"prompt": [6]}))
        await until(lambda: gateway.answers.requests == 2)
        writer.transport.abort()
        await until(lambda: gateway.answers.requests == 1)
        gateway.swarm.gate.set()
        assert (await first)[0] == 200
        assert gateway.swarm.served == 1
        assert (await gateway.post(TEXT, prompt=[7]))[0] == 200


async def test_a_client_that_takes_nothing_is_cut_off() -> None:
    config = GatewayConfig(write_s=0.3)
    async with paper_gateway(config=config) as gateway:
        # Log probabilities make the stream larger than what the kernel buffers.
        body = {"prompt": [5], "max_tokens": 1000, "stream": True, "logprobs": 20, "n": 16}
        reader, writer = await connect(gateway)
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(raw_request(body))
        await until(lambda: gateway.swarm.served == 16)
        await until(lambda: gateway.swarm.live == 0)
        await until(lambda: gateway.answers.requests == 0)
        writer.transport.abort()


async def half_open(
    gateway: PaperGateway,
) -> list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """30 say nothing, 30 end within the head, 30 within the body, 10 take nothing."""
    slow = []
    for at in range(100):
        reader, writer = await connect(gateway)
        slow.append((reader, writer))
        if 30 <= at < 60:
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Slow: ")
        elif 60 <= at < 90:
            writer.write(raw_request({"prompt": [5]}, length=10_000))
        elif at >= 90:
            reader._transport.pause_reading()  # type: ignore[attr-defined]
            body = {"prompt": [5], "max_tokens": 900, "stream": True, "logprobs": 20}
            writer.write(raw_request(body))
    return slow


async def test_a_hundred_half_open_and_slow_clients_leave_others_alone() -> None:
    async with paper_gateway(
        config=GatewayConfig(uploads=UploadsConfig(time_s=600.0)), head_s=600.0
    ) as gateway:
        slow = await half_open(gateway)
        await until(lambda: sum(gateway.gateway._uploads.unfinished.values()) >= 30)
        statuses = await asyncio.gather(
            *(gateway.post(TEXT, prompt=[at], max_tokens=5) for at in range(20))
        )
        assert [status for status, _ in statuses] == [200] * 20
        assert sum(gateway.gateway._uploads.unfinished.values()) >= 30, "they are still there"
        for _, writer in slow:
            writer.transport.abort()


async def test_half_open_and_slow_clients_are_not_there_for_ever() -> None:
    config = GatewayConfig(uploads=UploadsConfig(time_s=0.5), write_s=0.5)
    async with paper_gateway(config=config, head_s=0.5) as gateway:
        slow = await half_open(gateway)
        for reader, _ in slow[:90]:
            rest = await asyncio.wait_for(reader.read(), 60)
            assert rest == b"" or b" 408 " in rest.split(b"\r\n")[0], rest
        await until(lambda: gateway.answers.requests == 0)
        for _, writer in slow:
            writer.transport.abort()


def test_the_sweep_of_idle_connections_goes_on_after_it_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("dht.process.supervision.RESTART_S", 0.05)
    is_busy, failed = Gateway.is_busy, False

    def fails_once(self: Gateway, connection: Any) -> bool:
        nonlocal failed
        if not failed:
            failed = True
            raise OSError(24, "Too many open files")
        return is_busy(self, connection)

    monkeypatch.setattr(Gateway, "is_busy", fails_once)

    async def scenario() -> None:
        async with paper_gateway(head_s=0.5) as gateway:
            reader, _ = await connect(gateway)
            assert await asyncio.wait_for(reader.read(), 60) == b""
            assert failed
            async with gateway.http.get(f"{gateway.url}/metrics") as response:
                text = await response.text()
            assert 'anabranch:part_failures_total{part="close_idle"} 1.0' in text

    asyncio.run(scenario())


async def test_a_body_that_does_not_come_is_a_408() -> None:
    async with paper_gateway(config=GatewayConfig(uploads=UploadsConfig(time_s=0.2))) as gateway:
        reader, writer = await connect(gateway)
        writer.write(raw_request({"prompt": [5]}, length=10_000))
        answer = await asyncio.wait_for(reader.read(), 60)
        assert b" 408 " in answer.split(b"\r\n")[0]
        assert b"did not come within" in answer
        writer.close()


async def test_unfinished_bodies_of_one_address_keep_nobody_else_out() -> None:
    config = GatewayConfig(requests_max=4, uploads=UploadsConfig(per_address_max=8))
    async with paper_gateway(config=config) as gateway:
        writers = []
        for _ in range(8):
            _, writer = await connect(gateway)
            writer.write(raw_request({"prompt": [6]}, length=5000))
            writers.append(writer)
        await until(lambda: sum(gateway.gateway._uploads.unfinished.values()) == 8)
        assert gateway.answers.requests == 0, "they hold no place"
        status, answer = await gateway.post(TEXT, prompt=[7])
        assert status == 429
        assert "unfinished requests come from 127.0.0.1" in answer["error"]["message"]
        elsewhere = aiohttp.TCPConnector(local_addr=("127.0.0.2", 0))
        async with (
            aiohttp.ClientSession(connector=elsewhere) as http,
            http.post(gateway.url + TEXT, json={"prompt": [7]}) as response,
        ):
            assert response.status == 200
        for writer in writers:
            writer.transport.abort()
        await until(lambda: not gateway.gateway._uploads.unfinished)
        assert (await gateway.post(TEXT, prompt=[7]))[0] == 200


def test_asking_for_health_without_end_takes_a_look_a_second() -> None:
    """It needs no key, and each look takes longer the more peers strangers announce."""

    async def scenario() -> None:
        async with paper_gateway(config=GatewayConfig(health_s=3600.0)) as gateway:
            view, looks = gateway.swarm.view, 0
            look = view.answering_route

            def counted(now_s: float) -> Route | NoRoute:
                nonlocal looks
                looks += 1
                return look(now_s)

            view.answering_route = counted  # type: ignore[method-assign]
            for _ in range(20):
                async with gateway.http.get(gateway.url + "/health") as response:
                    assert response.status == 200
            assert looks == 1

    asyncio.run(scenario())


async def test_other_peoples_pages_may_not_spend_a_gateway_without_keys() -> None:
    """A browser sends JSON to any address after its name was bound to this one."""
    async with paper_gateway(config=GatewayConfig(origins=("https://mine.example",))) as gateway:
        for origin, status in (("https://evil.example", 403), ("https://mine.example", 200)):
            headers = {"Origin": origin, "Content-Type": JSON, "Host": "evil.example"}
            async with gateway.http.post(
                gateway.url + TEXT, data=b'{"prompt": [5]}', headers=headers
            ) as response:
                assert response.status == status
        assert gateway.swarm.served == 1


@pytest.mark.parametrize("path", [TEXT, "/v1/chat/completions"])
@pytest.mark.parametrize(
    "content", [None, "text/plain", "application/x-www-form-urlencoded", "text/json; a=" + JSON]
)
async def test_a_body_that_is_not_said_to_be_json_is_refused(
    path: str, content: str | None
) -> None:
    """A browser sends these for any page, without asking first."""
    async with paper_gateway() as gateway:
        chat = {"messages": [{"role": "user", "content": "a"}]}
        asked = chat if "chat" in path else {"prompt": [5]}
        body = json.dumps(asked).encode()
        headers = {} if content is None else {"Content-Type": content}
        async with gateway.http.post(
            gateway.url + path, data=body, headers=headers, skip_auto_headers=["Content-Type"]
        ) as response:
            assert response.status == 415
            assert JSON in (await response.json())["error"]["message"]
        assert gateway.swarm.served == 0
        headers = {"Content-Type": JSON + "; charset=utf-8"}
        async with gateway.http.post(gateway.url + path, data=body, headers=headers) as response:
            assert response.status == 200


@pytest.mark.parametrize(
    ("header", "status"),
    [
        (b"Origin: http://\xff\r\nContent-Type: application/json", 403),
        (b"Content-Type: text/\xff", 415),
        (b"Content-Type: application/json\r\nContent-Encoding: gzip", 400),
        (b"Content-Type: application/json\r\nExpect: \xff", 500),  # aiohttp's own
    ],
)
def test_what_no_text_or_no_gzip_is_fills_no_log(
    header: bytes, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Each such request wrote a traceback of 40 lines, and got a 500."""

    async def scenario() -> None:
        async with paper_gateway() as gateway:
            reader, writer = await connect(gateway)
            head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" + header
            writer.write(head + b"\r\nContent-Length: 2\r\n\r\n{}")
            said = await reader.read()
            assert said.startswith(b"HTTP/1.1 %d" % status)
            assert status == 500 or b'"error"' in said
            writer.close()

    asyncio.run(scenario())
    assert not [record for record in caplog.records if record.exc_info]
    assert caplog.text.isprintable() or caplog.text.encode(), "what is no text is logged as such"


@pytest.mark.parametrize(
    ("host", "listens_at", "answers"),
    [
        ("evil.example", "127.0.0.1", False),
        ("evil.example:8000", "127.0.0.1", False),
        ("localhost.evil.example", "localhost", False),
        ("127.0.0.1.evil.example", "::1", False),
        ("[", "127.0.0.1", False),
        ("10.1.2.3", "127.0.0.1", False),
        ("LocalHost:8000", "127.0.0.1", True),
        ("127.0.0.1:8000", "localhost", True),
        ("[::1]:8000", "127.0.0.1", True),
        ("Mine.example:8000", "127.0.0.1", True),
        ("evil.example", "10.1.2.3", False),  # a name was allowed: so others are not
        ("10.1.2.3:8000", "10.1.2.3", True),
    ],
)
async def test_a_gateway_without_keys_answers_to_its_own_names(
    host: str, listens_at: str, answers: bool
) -> None:
    """A page that binds its own name to this machine is of the same origin, and names none."""
    hosts = hosts_of(listens_at, ["mine.example"])
    for config, expected in (
        (GatewayConfig(hosts=hosts), answers),
        (GatewayConfig(hosts=hosts, keys=plain_keys(("key",))), True),
    ):
        async with paper_gateway(config=config) as gateway:
            headers = {"Host": host, "Authorization": "Bearer key"}
            for path in ("/v1/models", "/health", "/metrics"):
                async with gateway.http.get(gateway.url + path, headers=headers) as response:
                    assert (response.status == 200) is expected, path
                    if not expected:
                        assert "--allow-host" in await response.text()


def test_a_gateway_for_other_machines_answers_to_any_name_unless_some_are_allowed() -> None:
    assert hosts_of("0.0.0.0", []) is None  # noqa: S104  nothing listens here
    assert hosts_of("127.0.0.1", []) == {"127.0.0.1"}
    assert hosts_of("localhost", []) == {"localhost"}
    assert hosts_of("::", ["Mine.example"]) == {"::", "mine.example"}


def keys_of(monkeypatch: pytest.MonkeyPatch, *flags: str) -> tuple[Key, ...]:
    monkeypatch.setattr("sys.argv", ["gateway", "--model=m", *flags, "--initial-peers", "/ip4/x"])
    return command.check(command.parse())


def test_keys_come_from_a_file_or_the_environment_and_from_no_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "keys"
    file.touch(mode=0o600)
    file.write_text("alpha\n\n beta \n")
    monkeypatch.delenv(command.KEYS_VARIABLE, raising=False)
    assert keys_of(monkeypatch) == ()
    assert keys_of(monkeypatch, f"--api-key-file={file}") == plain_keys(("alpha", "beta"))
    monkeypatch.setenv(command.KEYS_VARIABLE, "gamma, delta,")
    assert keys_of(monkeypatch) == plain_keys(("gamma", "delta"))
    named = tmp_path / "keys.toml"
    named.touch(mode=0o600)
    named.write_text('keys.ann = {key = "alpha", sessions = 2}')
    assert [key.name for key in keys_of(monkeypatch, f"--api-key-file={named}")] == [
        "1",
        "2",
        "ann",
    ]
    named.write_text('keys.ann.key = "gamma"')
    with pytest.raises(UserError, match="1 and ann are the same key"):
        keys_of(monkeypatch, f"--api-key-file={named}")
    monkeypatch.delenv(command.KEYS_VARIABLE)
    named.chmod(0o640)
    with pytest.raises(UserError, match="mode 640, other users can read it; run: chmod 600"):
        keys_of(monkeypatch, f"--api-key-file={named}")
    file.write_text("\n")
    for wrong in (file, tmp_path / "none", tmp_path):
        with pytest.raises(UserError, match="--api-key-file"):
            keys_of(monkeypatch, f"--api-key-file={wrong}")
    with pytest.raises(UserError, match="--api-key"):
        keys_of(monkeypatch, "--api-key", "alpha")


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens", "/api/chat"]
)
def test_a_long_body_is_read_beside_the_event_loop(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results of 4 million parts took 46 s."""
    read_in: list[threading.Thread] = []

    def parse(*_: object) -> None:
        read_in.append(threading.current_thread())
        raise bad_request("no")

    monkeypatch.setattr(app, "parse_request", parse)

    async def scenario() -> None:
        async with paper_gateway() as gateway:
            assert (await gateway.post(path, messages=["a" * THREADS.long_size]))[0] == 400

    asyncio.run(scenario())
    assert [thread is threading.main_thread() for thread in read_in] == [False]


async def test_bytes_of_unfinished_requests_are_bounded() -> None:
    """256 bodies of 8 MiB, which one address may send at a time, took 2 GiB."""
    most = replace(BODY_BYTES, per_peer=100_000, in_all=150_000, crowded=None)
    config = GatewayConfig(proxies=LOCAL, uploads=UploadsConfig(held=most))
    async with paper_gateway(config=config) as gateway:
        long = b" " * (BODIES.uncounted_bytes + 60_000)
        held = gateway.gateway._uploads.held
        _, first = await connect(gateway)
        first.write(raw_request({}, length=len(long) + 10) + long)
        await until(lambda: held.total > 55_000)
        packed = zlib.compress(b"{}" + long)
        for said, status in (({}, 429), ({"X-Forwarded-For": "192.0.2.1"}, 400)):
            for data, encoding in ((b"{}" + long, "identity"), (packed, "deflate")):
                headers = {"Content-Type": JSON, "Content-Encoding": encoding, **said}
                async with gateway.http.post(
                    gateway.url + TEXT, data=data, headers=headers
                ) as response:
                    assert response.status == status, await response.text()
        first.transport.abort()
        await until(lambda: held.total == 0)
        assert not held.by_peer


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
async def test_what_was_understood_is_not_kept_while_it_is_answered(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A body of 8 MiB may be read as objects of 200 MiB, of which an answer needs none."""
    made: list[weakref.ref[Any]] = []
    parse = app.parse_request

    def noted(body: bytes, kind: Any) -> Any:
        weak = msgspec.defstruct("Weak", [], bases=(kind,), weakref=True, kw_only=True)
        made.append(weakref.ref(request := parse(body, weak)))
        return request

    monkeypatch.setattr(app, "parse_request", noted)
    async with paper_gateway() as gateway:
        gateway.swarm.gate = asyncio.Event()
        said = [{"role": "user", "content": "alfa"}]
        name = "input" if path.endswith("responses") else "messages"
        length = "max_output_tokens" if name == "input" else "max_tokens"
        body: dict[str, object] = {name: said, length: 8}
        asking = asyncio.create_task(gateway.post(path, **body))
        await until(lambda: gateway.swarm.live == 1)
        gc.collect()
        assert [ref() for ref in made] == [None]
        gateway.swarm.gate.set()
        assert (await asking)[0] == 200
