"""Mistakes, limits and a swarm that cannot serve: OpenAI's error form and the right status."""

import asyncio
import dataclasses
import gc
import json
import threading
import tracemalloc
from typing import Any

import pytest

from client import UnavailableError
from client.gateway.answering import text_threads
from client.gateway.errors import ApiError
from client.gateway.keys import plain_keys
from client.gateway.protocols.openai_responses import ResponsesRequest, chat_of_response
from client.gateway.protocols.requests import ChatRequest, CompletionRequest, parse_request
from client.gateway.web.app import GatewayConfig
from client.gateway.web.uploads import UploadsConfig
from client.text.tokenizer import Tokenizer
from dht.errors import NetworkError, SwarmError
from tests.unit.client.gateway.paper import PaperGateway, paper_gateway
from tests.unit.client.gateway.waiting import until

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
HI = [{"role": "user", "content": "Hi"}]


def error_of(body: Any) -> dict[str, Any]:
    """The error object, which has OpenAI's four fields and nothing else."""
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    return error


@pytest.mark.parametrize(
    ("path", "body", "param", "said"),
    [
        (TEXT, {}, "prompt", "missing required field"),
        (TEXT, {"prompt": 5}, "prompt", "Expected"),
        (TEXT, {"prompt": []}, "prompt", "0 prompts"),
        (TEXT, {"prompt": ""}, None, None),
        (TEXT, {"prompt": [[]]}, "prompt", "the prompt is empty"),
        (TEXT, {"prompt": ["a", [1]]}, "prompt", "mixes"),
        (TEXT, {"prompt": [1, "a"]}, "prompt", "mixes"),
        (TEXT, {"prompt": [5000]}, "prompt", "token id 5000 in the prompt"),
        (TEXT, {"prompt": [-1], "echo": True}, "prompt", "token id -1 in the prompt"),
        (TEXT, {"prompt": "a", "max_tokens": -2}, "max_tokens", ">= -1"),
        (TEXT, {"prompt": "a", "max_tokens": 0}, "max_tokens", "max_tokens is 0"),
        (TEXT, {"prompt": "a", "max_tokens": "x"}, "max_tokens", "Expected `int"),
        (TEXT, {"prompt": "a", "max_tokens": 7.5}, "max_tokens", "Expected `int"),
        (TEXT, {"prompt": "a", "temperature": 3}, "temperature", "<= 2"),
        (TEXT, {"prompt": "a", "top_p": -0.1}, "top_p", ">= 0"),
        (TEXT, {"prompt": "a", "n": 17}, "n", "<= 16"),
        (TEXT, {"prompt": ["a"] * 17, "n": 16}, "n", "256 at most"),
        (TEXT, {"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias", "token ids"),
        (TEXT, {"prompt": "a", "logit_bias": {"9999": 1}}, "logit_bias", "9999 in logit_bias"),
        (TEXT, {"prompt": "a", "stop_token_ids": [9999]}, "stop_token_ids", "in stop_token_ids"),
        (TEXT, {"prompt": "a", "logprobs": 21}, "logprobs", "<= 20"),
        (TEXT, {"prompt": "a", "suffix": "b"}, "suffix", "not supported"),
        (TEXT, {"prompt": "a", "best_of": 3}, "best_of", "not supported"),
        (TEXT, {"prompt": "a", "stop": ["x", ""]}, "stop", "empty"),
        (TEXT, {"prompt": "a", "stop": ["x"] * 17}, "stop", "<= 16"),
        (TEXT, {"prompt": "a", "stop": "x" * 1025}, "stop", "<= 1024"),
        (TEXT, {"prompt": "a", "stop": ["x", "y" * 1025]}, "stop[1]", "<= 1024"),
        (TEXT, {"prompt": "a", "min_tokens": 20}, "min_tokens", "min_tokens is 20"),
        (TEXT, {"prompt": "\ud800"}, None, None),
        (CHAT, {"messages": []}, "messages", ">= 1"),
        (CHAT, {"messages": [{"content": "x"}]}, "messages[0]", "missing required field `role`"),
        (CHAT, {"messages": HI, "tools": [{}]}, "tools[0]", "missing required field `function`"),
        (CHAT, {"messages": HI, "tools": [TOOL]}, "tools", "no way to call tools"),
        (CHAT, {"messages": HI, "tool_choice": "required"}, "tool_choice", "no tools"),
        (
            CHAT,
            {"messages": HI, "tools": [TOOL], "tool_choice": {"function": {"name": "other"}}},
            "tool_choice",
            "'other'",
        ),
        (
            CHAT,
            {"messages": HI, "response_format": {"type": "x"}},
            "response_format.type",
            "'json_object', 'json_schema', 'text' may be",
        ),
        (
            CHAT,
            {"messages": HI, "response_format": {"type": "json_schema"}},
            "response_format",
            "no json_schema",
        ),
        (CHAT, {"messages": HI, "guided_json": "{"}, "guided_json", "not JSON"),
        (CHAT, {"messages": HI, "guided_json": '{"const": "\\ud800"}'}, "guided_json", "UTF-8"),
        ("/v1/embeddings", {"input": "a"}, None, "embeddings are not served"),
        (CHAT, {"messages": HI, "guided_json": "[]"}, "guided_json", "no JSON schema"),
        (TEXT, {"prompt": "a", "guided_regex": "a" * 70_000}, "guided_regex", "65536 at most"),
        (
            TEXT,
            {"prompt": "a", "guided_regex": "a", "guided_choice": ["a"]},
            "guided_choice",
            "at once",
        ),
        (TEXT, {"prompt": "a", "guided_regex": "a", "ignore_eos": True}, None, "end-of-text"),
        (CHAT, {"messages": HI, "top_logprobs": 3}, "top_logprobs", "logprobs: true"),
        (CHAT, {"messages": HI, "max_completion_tokens": 0}, "max_completion_tokens", "is 0"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0].type",
            "image_url",
        ),
    ],
)  # fmt: skip
async def test_a_mistake_is_named(
    path: str, body: dict[str, Any], param: str | None, said: str | None
) -> None:
    async with paper_gateway() as gateway:
        status, answer = await gateway.post(path, **body)
        if said is None:  # an empty text still has the token that begins every text
            assert status in {200, 400}
            return
        assert status == 400, answer
        error = error_of(answer)
        assert error["type"] == "invalid_request_error"
        assert error["param"] == param
        assert said in error["message"]
        assert gateway.swarm.served == 0


@pytest.mark.parametrize("text", ["", "{", "[1]", '"x"', "nul", "\xff", '{"prompt":' * 3000])
async def test_what_is_not_json_is_refused(text: str) -> None:
    async with paper_gateway() as gateway:
        data = text.encode("latin-1")
        headers = {"Content-Type": "application/json"}
        async with gateway.http.post(gateway.url + TEXT, data=data, headers=headers) as response:
            assert response.status == 400
            error_of(await response.json())


NESTED = {
    "/v1/responses": '{"input": [{"type": "function_call_output", "call_id": "a", "output": %s}]}',
    CHAT: '{"messages": [{"role": "assistant", "tool_calls":'
    ' [{"function": {"name": "a", "arguments": {"a": %s}}}]}]}',
}


@pytest.mark.parametrize("path", NESTED)
async def test_what_nests_too_deep_is_the_callers_mistake(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    """What JSON's own reader still takes, others recurse over."""
    headers = {"Content-Type": "application/json"}
    async with paper_gateway() as gateway:
        for depth in (500, 900, 960):
            data = NESTED[path] % ("[" * depth + "]" * depth)
            async with gateway.http.post(
                gateway.url + path, data=data, headers=headers
            ) as response:
                assert response.status in {200, 400}, await response.text()
    assert "a request failed" not in caplog.text


CALLED = {"role": "assistant", "tool_calls": [{"function": {"name": "a"}}] * 128}
HOSTED = {"type": "mcp_tool_result", "tool_use_id": "a"}
SAID = {"role": "user", "content": [{"type": "text", "text": ""}] * 4096}


@pytest.mark.parametrize(
    ("path", "message", "count", "said"),
    [
        (CHAT, CALLED, 33, "4224 calls"),
        (CHAT, SAID, 17, "69632 parts"),
        ("/v1/messages", {"role": "assistant", "content": [HOSTED] * 2049}, 1, "4098 messages"),
        ("/v1/messages/count_tokens", {"role": "user", "content": [HOSTED] * 2049}, 1, "4098"),
    ],
)
async def test_parts_of_a_conversation_are_bounded_together(
    path: str, message: dict[str, Any], count: int, said: str
) -> None:
    """Each call may become a message: 32 kB of them took a template 5 s, and 1 MB over an hour."""
    async with paper_gateway() as gateway:
        status, body = await gateway.post(path, max_tokens=1, messages=[message] * count)
        assert status == 400
        assert f"messages has {said}" in str(body)


def test_no_request_makes_more_than_a_line_of_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    call = {"function": {"name": "a", "arguments": "no JSON"}}
    messages = [{"role": "assistant", "tool_calls": [call] * 100}] * 10
    body = json.dumps({"messages": messages}).encode()
    for message in parse_request(body, ChatRequest).messages:
        message.as_dict()
    items = [{"type": "web_search_call"}] * 100 + [{"role": "user", "content": "x"}]
    chat_of_response(parse_request(json.dumps({"input": items}).encode(), ResponsesRequest))
    assert caplog.records == []


async def test_a_prompt_beyond_the_context_has_openais_code() -> None:
    async with paper_gateway() as gateway:
        for body in ({"prompt": [5] * 1024}, {"prompt": [5] * 1000, "max_tokens": 25}):
            status, answer = await gateway.post(TEXT, **body)
            assert status == 400
            assert error_of(answer)["code"] == "context_length_exceeded"
        # A chat that names no length takes what there is.
        long = [{"role": "user", "content": "a b c d e f " * 60}]
        status, answer = await gateway.post(CHAT, messages=long)
        assert status == 200
        assert answer["usage"]["total_tokens"] == 1024  # type: ignore[index]


async def test_another_model_path_or_method() -> None:
    async with paper_gateway() as gateway:
        status, answer = await gateway.post(TEXT, prompt="a", model="gpt-4")
        assert status == 404
        assert error_of(answer)["code"] == "model_not_found"
        assert "brook" in error_of(answer)["message"]
        status, answer = await gateway.post("/v1/embeddings", input="a")
        assert status == 400
        assert "embeddings are not served here" in error_of(answer)["message"]
        async with gateway.http.get(gateway.url + TEXT) as response:
            assert response.status == 405
            assert response.headers["Allow"] == "POST"
            error_of(await response.json())


async def test_a_model_without_a_template_or_a_tokenizer() -> None:
    async with paper_gateway(template=None) as gateway:
        status, answer = await gateway.post(CHAT, messages=HI)
        assert status == 400
        assert error_of(answer)["code"] == "no_chat_template"
    async with paper_gateway(template=None, tokenizer=False) as gateway:
        for body in ({"prompt": "text"}, {"prompt": [5], "stop": "x"}):
            status, answer = await gateway.post(TEXT, **body)
            assert status == 400
            assert "tokenizer" in error_of(answer)["message"]
        status, answer = await gateway.post(TEXT, prompt=[5, 6], logprobs=1, max_tokens=2)
        assert status == 200
        tokens = answer["choices"][0]["logprobs"]["tokens"]  # type: ignore[index]
        assert all(token.startswith("token_id:") for token in tokens)


async def test_a_template_that_refuses_says_why() -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}"
        "{{ raise_exception('no such messages') }}{% endif %}{{ m.content }}{% endfor %}"
    )
    async with paper_gateway(template=template) as gateway:
        status, answer = await gateway.post(CHAT, messages=[{"role": "user", "content": "x"}])
        assert status == 400
        assert "no such messages" in error_of(answer)["message"]


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    "fails",
    [
        UnavailableError("layers 2-3 held by nobody that can be reached", ((2, 4),)),
        SwarmError("no"),
        NetworkError("gone"),
    ],
)
async def test_a_swarm_that_cannot_serve_is_a_503(fails: Exception, streams: bool) -> None:
    async with paper_gateway() as gateway:
        gateway.swarm.fails = fails
        url, body = gateway.url + TEXT, {"prompt": "a", "stream": streams, "n": 2}
        async with gateway.http.post(url, json=body) as response:
            assert response.status == 503
            assert int(response.headers["Retry-After"]) > 0
            error = error_of(await response.json())
        assert str(fails) in error["message"]
        assert error["type"] == "server_error"
        await until(lambda: gateway.swarm.live == 0)


@pytest.mark.parametrize(("known_s", "told"), [(39.2, "40"), (0.0, "5"), (0.1, "1")])
async def test_a_client_is_told_to_come_back_when_the_swarm_has_room(
    known_s: float, told: str
) -> None:
    async with paper_gateway() as gateway:
        gateway.swarm.fails = UnavailableError("the peers are full", retry_after_s=known_s)
        async with gateway.http.post(gateway.url + TEXT, json={"prompt": "a"}) as response:
            assert (response.status, response.headers["Retry-After"]) == (503, told)


async def test_a_fault_is_a_500_that_tells_nothing() -> None:
    async with paper_gateway() as gateway:
        gateway.swarm.fails = KeyError("secret")
        status, answer = await gateway.post(TEXT, prompt="a")
        assert status == 500
        assert "secret" not in json.dumps(error_of(answer))


async def test_a_stream_that_fails_on_the_way_says_so_and_has_no_done() -> None:
    async with paper_gateway() as gateway:
        gateway.swarm.fails = SwarmError("everybody left")
        gateway.swarm.fails_after = 5
        body = {"prompt": "a", "stream": True, "max_tokens": 16}
        async with gateway.http.post(gateway.url + TEXT, json=body) as response:
            assert response.status == 200
            events = (await response.text()).strip().split("\n\n")
        last = json.loads(events[-1].removeprefix("data: "))
        assert "everybody left" in error_of(last)["message"]
        assert len(events) > 1


async def test_keys_are_asked_for_where_they_are_set() -> None:
    config = GatewayConfig(keys=plain_keys(("alpha", "beta")))
    async with paper_gateway(config=config) as gateway:

        async def status(path: str, header: str | None) -> int:
            headers = {} if header is None else {"Authorization": header}
            async with gateway.http.get(gateway.url + path, headers=headers) as response:
                if response.status == 401:
                    assert response.headers["WWW-Authenticate"] == "Bearer"
                    assert error_of(await response.json())["code"] == "invalid_api_key"
                return response.status

        for header in (None, "alpha", "Bearer", "Bearer x", "Basic alpha", "Bearer alph"):
            assert await status("/v1/models", header) == 401, header
        for header in ("Bearer alpha", "bearer beta"):
            assert await status("/v1/models", header) == 200
        for path in ("/health", "/metrics", "/openapi.json"):
            assert await status(path, None) == 200


@pytest.mark.parametrize(
    ("origins", "origin", "allowed"),
    [
        ((), "https://a.example", None),
        (("https://a.example",), "https://a.example", "https://a.example"),
        (("https://a.example",), "https://b.example", None),
        (("*",), "https://b.example", "*"),
        (("moz-extension://*",), "moz-extension://4f2a", "moz-extension://4f2a"),
    ],
)
async def test_web_pages_may_call_only_where_allowed(
    origins: tuple[str, ...], origin: str, allowed: str | None
) -> None:
    config = GatewayConfig(origins=origins, keys=plain_keys(("key",)))
    async with paper_gateway(config=config) as gateway:
        headers = {"Origin": origin, "Access-Control-Request-Method": "POST"}
        async with gateway.http.options(gateway.url + TEXT, headers=headers) as response:
            assert response.headers.get("Access-Control-Allow-Origin") == allowed
            assert response.status == (204 if allowed else 401)
        headers["Authorization"] = "Bearer key"
        body = {"prompt": "a", "stream": True}
        async with gateway.http.post(gateway.url + TEXT, headers=headers, json=body) as got:
            assert got.status == 200
            assert got.headers.get("Access-Control-Allow-Origin") == allowed


@pytest.mark.parametrize("keys", [(), ("key",)])
async def test_the_owner_hears_of_pages_that_are_refused(
    keys: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    """Their visitors see that a request failed, and a browser tells no page why."""
    config = GatewayConfig(keys=plain_keys(keys), pages_told_max=2)
    async with paper_gateway(config=config) as gateway:
        for at in (0, 0, 1, 2):
            headers = {"Origin": f"https://{at}.example", "Access-Control-Request-Method": "POST"}
            async with gateway.http.options(gateway.url + TEXT, headers=headers) as response:
                assert response.status == (401 if keys else 405)
    told = [each.getMessage() for each in caplog.records]
    pages = [f"a web page of 'https://{at}.example' may not call" for at in (0, 1)]
    assert [line.partition(";")[0] for line in told] == pages, "each once, and not without end"
    assert all("--allow-origin" in line for line in told)


async def open_request(gateway: PaperGateway, **body: object) -> "asyncio.Task[int]":
    async def post() -> int:
        async with gateway.http.post(gateway.url + TEXT, json={"prompt": "a", **body}) as response:
            await response.read()
            return response.status

    return asyncio.create_task(post())


async def test_too_many_requests_wait_and_then_are_refused() -> None:
    config = GatewayConfig(answers_at_once_max=2, requests_max=4)
    async with paper_gateway(config=config) as gateway:
        gateway.swarm.gate = asyncio.Event()
        waiting = [await open_request(gateway) for _ in range(4)]
        await until(lambda: gateway.answers.requests == 4 and gateway.swarm.live == 2)
        async with gateway.http.post(gateway.url + TEXT, json={"prompt": "a"}) as response:
            assert response.status == 429
            assert int(response.headers["Retry-After"]) > 0
            assert error_of(await response.json())["code"] == "rate_limit_exceeded"
        gateway.swarm.gate.set()
        assert await asyncio.gather(*waiting) == [200] * 4


async def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with paper_gateway() as gateway:
        tokenizer = gateway.swarm.text.tokenizer
        assert tokenizer is not None
        tokenized: list[int] = []

        def counted(text: str, *, special_tokens: bool = True) -> tuple[int, ...]:
            tokenized.append(len(text))
            return Tokenizer.encode(tokenizer, text, special_tokens=special_tokens)

        monkeypatch.setattr(tokenizer, "encode", counted)
        text = "a" * 7_000_000
        for path, body in (
            (TEXT, {"prompt": text}),
            (TEXT, {"prompt": ["a", text]}),
            (CHAT, {"messages": [{"role": "user", "content": text}]}),
        ):
            status, answer = await gateway.post(path, **body)
            assert status == 400
            assert error_of(answer)["code"] == "context_length_exceeded"
        assert max(tokenized) == 1
        # 14 characters, the longest that one token stands for, as often as the context takes.
        vocabulary = [tokenizer.token_text(n) for n in range(2048)]
        word = max(vocabulary, key=len)
        status, _ = await gateway.post(TEXT, prompt=word * 1022, max_tokens=1)
        assert status == 200, "and what does fit is taken"


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        (TEXT, "prompt", [[]] * 300_000),
        (TEXT, "prompt", ["a", *[[]] * 300_000]),
        (TEXT, "logit_bias", {str(at): 1 for at in range(100_000)}),
        (CHAT, "tools", [[]] * 300_000),
        (CHAT, "messages", [{"role": "a"}] * 100_000),
    ],
)
def test_a_body_of_many_small_things_is_refused_before_they_are_made(
    path: str, field: str, value: object
) -> None:
    kind = CompletionRequest if path == TEXT else ChatRequest
    whole = {"prompt": "a"} if path == TEXT else {"messages": HI}
    body = json.dumps({**whole, field: value}).encode()
    collections: list[str] = []
    gc.callbacks.append(lambda phase, _: collections.append(phase))
    tracemalloc.start()
    try:
        with pytest.raises(ApiError) as raised:
            parse_request(body, kind)  # type: ignore[type-var]
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        gc.callbacks.pop()
    assert raised.value.param == field
    assert raised.value.status == 400
    assert peak_bytes < 6 * len(body)
    assert len(collections) < 20, "one for each 700 lists or objects that were made"


async def test_the_loop_goes_on_while_long_texts_are_tokenized(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(text_threads, "THREADS", text_threads.ThreadsConfig(long_size=50_000))

    async with paper_gateway() as gateway:
        swarm, begun, ends = gateway.swarm, threading.Semaphore(0), threading.Event()
        tokenizer = swarm.text.tokenizer
        assert tokenizer is not None

        class Slow:
            """Encodes long texts when it is let to."""

            def encode(self, text: str, *, special_tokens: bool = True) -> tuple[int, ...]:
                if len(text) > 50_000:
                    begun.release()
                    assert ends.wait(60)
                return tokenizer.encode(text, special_tokens=special_tokens)

            def __getattr__(self, name: str) -> Any:
                return getattr(tokenizer, name)

        swarm.text = dataclasses.replace(swarm.text, tokenizer=Slow())
        long = asyncio.gather(
            *(gateway.post(TEXT, prompt="a" * 57_000 + str(at)) for at in range(5)),
            *(gateway.post(CHAT, messages=[{"role": "u", "content": "b" * 57_000}])
              for _ in range(5)),
        )  # fmt: skip
        await until(lambda: gateway.answers.requests == 10 and begun.acquire(blocking=False))
        status, _ = await gateway.post(TEXT, prompt="short")
        assert status == 200
        assert not begun.acquire(blocking=False), "one long text at a time"
        ends.set()
        assert {status for status, _ in await long} == {400}


async def test_a_large_body_is_refused() -> None:
    async with paper_gateway(
        config=GatewayConfig(uploads=UploadsConfig(bytes_max=1000))
    ) as gateway:
        status, answer = await gateway.post(TEXT, prompt="a" * 2000)
        assert status == 413
        assert error_of(answer)["code"] == "too_large"
        assert (await gateway.post(TEXT, prompt="a"))[0] == 200


async def test_a_draining_gateway_finishes_what_runs() -> None:
    from client.gateway.web.server import drain

    async with paper_gateway() as gateway:
        gateway.swarm.gate = asyncio.Event()
        running = await open_request(gateway)
        await until(lambda: gateway.swarm.live == 1)
        draining = asyncio.create_task(drain(gateway.gateway, gateway.answers, 60))
        await until(lambda: gateway.gateway.draining)
        assert (await gateway.post(TEXT, prompt="a"))[0] == 503
        assert not draining.done()
        gateway.swarm.gate.set()
        assert await running == 200
        assert await draining
