"""The page to chat on: its files and headers, who may ask by it, what streams tell of routes."""

import re
from contextlib import aclosing

import pytest

from client.answer.generation import BOUNDS, GenerationOptions
from client.gateway.answering.answers import ANSWERING, ChoiceTask
from client.gateway.keys import plain_keys
from client.gateway.web.app import CHAT_FILES, GatewayConfig
from client.gateway.web.callers import hosts_of
from client.pages.fixed import HEADERS
from tests.unit.client.gateway.paper import PaperGateway, paper_gateway
from tests.unit.client.gateway.test_answers import stream
from tests.unit.client.gateway.waiting import until

CHATS = "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]
JSON = "application/json"
ROUTE = {"stream_options": {"include_route": True}}


async def test_the_page_is_open_to_all_and_its_headers_keep_foreign_code_out() -> None:
    async with paper_gateway(config=GatewayConfig(keys=plain_keys(("key",)))) as gateway:
        for path in CHAT_FILES:
            async with gateway.http.get(gateway.url + path) as response:
                assert response.status == 200, "without a key: the page asks for it"
                assert HEADERS.items() <= response.headers.items()
                assert "unsafe" not in response.headers["Content-Security-Policy"]
        async with gateway.http.get(gateway.url + "/v1/models") as response:
            assert response.status == 401


def test_the_files_hold_nothing_that_the_policy_would_stop() -> None:
    texts = {path: file.read_text("utf-8") for path, file in CHAT_FILES.items()}
    assert not re.search(r"<script(?! src=)|<style|\son\w+=|\sstyle=|https?:", texts["/"])
    styles = "".join(text for path, text in texts.items() if path.endswith(".css"))
    assert not re.search(r"@import|url\((?!mark\.svg\))", styles)
    script = "".join(text for path, text in texts.items() if path.endswith(".js"))
    markup = (
        r"innerHTML|outerHTML|insertAdjacent|setHTML|DOMParser|document\.write|\beval|Function\("
    )
    assert not re.search(markup, script)
    hosts = set(re.findall(r"https?://[\w.]+", script))
    assert hosts == {"http://www.w3.org"}, "names of SVG and MathML, which nobody fetches"
    assert "localStorage" not in texts["/static/asking.js"], "a key lives as long as its tab"


def test_the_page_asks_for_a_temperature_within_its_bounds() -> None:
    bounds = BOUNDS["temperature"]
    said = re.search(r'id="temperature" .*?min="(.*?)" max="(.*?)"', CHAT_FILES["/"].read_text())
    assert said is not None
    assert tuple(map(float, said.groups())) == (bounds.ge, bounds.le)


async def test_a_browser_that_has_a_file_is_not_sent_it_again() -> None:
    async with paper_gateway() as gateway:
        url = f"{gateway.url}/static/markdown.js"
        async with gateway.http.get(url) as response:
            etag, size = response.headers["ETag"], len(await response.read())
            assert int(response.headers["Content-Length"]) < size / 2, "compressed"
        async with gateway.http.get(url, headers={"If-None-Match": etag}) as response:
            assert (response.status, await response.read()) == (304, b"")
            assert HEADERS.items() <= response.headers.items()


async def asked(gateway: PaperGateway, host: str, origin: str) -> int:
    headers = {"Host": host, "Origin": origin, "Content-Type": JSON}
    body = b'{"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}'
    async with gateway.http.post(gateway.url + CHATS, data=body, headers=headers) as response:
        return response.status


@pytest.mark.parametrize(
    ("listens_at", "allowed", "host", "origin", "status"),
    [
        ("127.0.0.1", (), "127.0.0.1:8000", "http://127.0.0.1:8000", 200),
        ("127.0.0.1", (), "localhost:8000", "http://localhost:8000", 200),
        ("127.0.0.1", (), "[::1]:8000", "http://[::1]:8000", 200),
        ("127.0.0.1", ("mine.example",), "mine.example", "https://mine.example", 200),
        ("0.0.0.0", (), "10.1.2.3:8000", "http://10.1.2.3:8000", 200),  # noqa: S104
        # Pages of others: another port or name of this machine, an address of their own,
        ("127.0.0.1", (), "localhost:8000", "http://localhost:3000", 403),
        ("127.0.0.1", (), "localhost:8000", "http://127.0.0.1:8000", 403),
        ("0.0.0.0", (), "10.1.2.3:8000", "http://203.0.113.5:8000", 403),  # noqa: S104
        # a name that they bound to this machine,
        ("127.0.0.1", (), "evil.example:8000", "http://evil.example:8000", 403),
        ("0.0.0.0", (), "evil.example:8000", "http://evil.example:8000", 403),  # noqa: S104
        # and origins that are none.
        ("127.0.0.1", (), "localhost:8000", "null", 403),
        ("127.0.0.1", (), "localhost:8000", "ftp://localhost:8000", 403),
        ("127.0.0.1", (), "localhost:8000", "http://localhost:8000@evil.example", 403),
        ("127.0.0.1", (), "localhost:8000", "http://[", 403),
    ],
)
async def test_without_keys_only_a_page_of_the_gateway_itself_may_ask(
    listens_at: str, allowed: tuple[str, ...], host: str, origin: str, status: int
) -> None:
    config = GatewayConfig(hosts=hosts_of(listens_at, allowed))
    async with paper_gateway(config=config) as gateway:
        assert await asked(gateway, host, origin) == status
        assert gateway.swarm.served == (status == 200)


async def test_a_stream_tells_its_route_and_who_left_it_where_that_is_asked() -> None:
    async with paper_gateway() as gateway:
        gateway.swarm.serve({"birch": (0, 4), "attic": (4, 8), "kestrel": (0, 4)})
        gateway.swarm.loses_at = 2
        asked = {"messages": HI, "max_tokens": 4}
        chunks = await stream(gateway, CHATS, **asked, **ROUTE)
        told = [chunk["route"] for chunk in chunks if "route" in chunk]
        assert all(chunk["choices"] == [] for chunk in chunks if "route" in chunk)
        names = [[stage["name"] for stage in route["stages"]] for route in told]
        assert names == [["birch", "attic"]] * 3 + [["kestrel", "attic"]] * 2
        states = [route["state"] for route in told]
        assert states == ["opening", "open", "drawing", "opening", "open"]
        assert [route["failovers"] for route in told] == [0, 0, 1, 1, 1]
        assert [s["name"] for s in told[2]["lost"]] == ["birch"]
        assert told[-1]["lost"] == []
        assert told[0]["stages"][0] == {"peer": "id 0", "name": "birch", "start": 0, "end": 4}
        plain = await stream(gateway, CHATS, **asked)
        texts = [chunk["choices"] for chunk in chunks if "route" not in chunk]
        assert texts == [chunk["choices"] for chunk in plain]


async def test_a_slow_reader_gets_the_newest_word_on_the_route() -> None:
    async with paper_gateway() as gateway:
        swarm = gateway.swarm
        swarm.serve({"birch": (0, 4), "attic": (4, 8), "kestrel": (0, 4)})
        options = GenerationOptions(max_new_tokens=ANSWERING.pieces_queued_max + 9, temperature=0.0)
        task = ChoiceTask(index=0, prompt_ids=(5,), options=options, tells_route=True)
        async with aclosing(gateway.answers.parts(swarm, [task])) as parts:
            got = [await anext(parts)]
            # With the first two words on the route, so many pieces fill the queue.
            swarm.loses_at = ANSWERING.pieces_queued_max - 1
            await until(lambda: swarm.losses == 1)
            got += [part async for part in parts]
        told = [part.route for part in got if part.route is not None]
        states = [(each.state.value, each.failovers) for each in told]
        assert states == [("opening", 0), ("running", 0), ("running", 1)]
        assert sum(len(part.piece.token_ids) for part in got) == ANSWERING.pieces_queued_max + 9


async def test_names_of_peers_are_made_fit_and_their_reasons_bounded() -> None:
    async with paper_gateway() as gateway:
        gateway.swarm.serve({"\u202e<b>http://203.0.113.7/" + "x" * 90: (0, 8)})
        chunks = await stream(gateway, CHATS, messages=HI, max_tokens=1, **ROUTE)
        (name,) = {s["name"] for c in chunks if "route" in c for s in c["route"]["stages"]}
        assert len(name) <= 32
        assert "//" not in name
        assert "\u202e" not in name
