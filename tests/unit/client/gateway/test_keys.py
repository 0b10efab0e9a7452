"""Keys with names: what each may use, what it is told then, and what is told of it."""

import asyncio
import hashlib
import logging
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest

import client.gateway.__main__ as command
from client.gateway.errors import RETRY_AFTER_S, ApiError
from client.gateway.keys import (
    Account,
    Key,
    Keys,
    SpanLimit,
    check_distinct,
    named_keys,
    plain_keys,
)
from client.gateway.web.app import GatewayConfig, requests
from dht.errors import SwarmError, UserError
from tests.unit.client.gateway.paper import PaperGateway, paper_gateway
from tests.unit.client.gateway.waiting import until

NOON_S = 20_000 * 86_400 + 43_200.0
ASKED: Any = {"model": "brook", "prompt": [*range(1, 41)], "max_tokens": 2}


def key(name: str, **quota: Any) -> Key:
    (plain,) = plain_keys((f"{name}-secret",))
    return replace(plain, name=name, **quota)


def test_a_file_names_keys_their_quotas_and_salts() -> None:
    digest = hashlib.sha256(b"secret").hexdigest()
    ann, bob, eve = named_keys(
        f"""
        [keys.ann]
        key = "secret "
        tokens_per_day = 1000
        requests_per_minute = 5
        sessions = 2
        [keys.bob]
        sha256 = "{digest[::-1]}"
        salt = "team"
        [keys.eve]
        key = "other"
        salt = "team"
        """
    )
    assert (ann.name, ann.digest.hex()) == ("ann", digest)
    assert (ann.tokens_per_day, ann.requests_per_minute, ann.sessions) == (1000, 5, 2)
    assert bob.digest.hex() == digest[::-1]
    assert (bob.tokens_per_day, bob.requests_per_minute, bob.sessions) == (None, None, None)
    assert bob.salt == eve.salt != ann.salt
    assert "secret" not in repr((ann, bob, eve))
    taken = named_keys(f'keys.ann = {{key = "x", salt = "{digest}"}}')[0]
    assert taken.salt != ann.salt, "a salt is not what another key has by itself"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "keys = 7",
        "[keys]",
        'keys.ann = "hidden"',
        "keys.ann = {}",
        'keys.ann = {key = ""}',
        f'keys.ann = {{key = "hidden", sha256 = "{"0" * 64}"}}',
        'keys.ann = {sha256 = "hidden"}',
        'keys.ann = {key = "hidden", tokens_per_day = 0}',
        'keys.ann = {key = "hidden", tokens_per_day = "1"}',
        'keys.ann = {key = "hidden", token_per_day = 1}',
        'keys.ann = {key = "hidden", salt = "a\\nb"}',
        'keys."ann lee" = {key = "hidden"}',
        'keys."ann\\n" = {key = "hidden"}',
        'keys."-" = {key = "hidden"}',
        'keys.ann = {key = "hidden"',
        'other = 1\nkeys.ann = {key = "hidden"}',
        "\n".join(f'keys.k{number}.key = "hidden{number}"' for number in range(1025)),
    ],
)
def test_a_file_that_is_wrong_is_refused_without_a_word_of_a_key(text: str) -> None:
    with pytest.raises(UserError) as refused:
        named_keys(text)
    assert "hidden" not in str(refused.value)


def test_the_entry_that_is_wrong_is_named() -> None:
    with pytest.raises(UserError, match=r"keys\.bob: .*tokens_per_day"):
        named_keys('keys.ann = {key = "x"}\nkeys.bob = {key = "y", tokens_per_day = 0}')


def test_keys_are_distinct_and_an_empty_one_is_nobodys() -> None:
    check_distinct((key("ann"), key("bob")))
    with pytest.raises(UserError, match="two keys are called 1"):
        check_distinct((*plain_keys(("x",)), Key(name="1", digest=b"other", salt="")))
    with pytest.raises(UserError, match="1 and twin are the same key") as refused:
        check_distinct((*plain_keys(("x", "x", "")), replace(plain_keys(("x",))[0], name="twin")))
    assert "x" not in str(refused.value).split()
    empty = Key(name="e", digest=hashlib.sha256(b"").digest(), salt="")
    for text in ("", " "):
        with pytest.raises(ApiError):
            Keys((empty,)).find(text)


def test_a_window_gives_each_span_its_amount() -> None:
    window = SpanLimit(10, 60)
    assert window.take(7, 120.0) == 0
    assert window.take(4, 130.5) == 50
    window.give_back(5, 120.0)
    assert window.take(8, 179.9) == 0
    assert window.take(1, 179.9) == 1
    assert window.take(10, 180.0) == 0
    window.give_back(8, 179.9)
    assert window.take(1, 181.0) == 59, "what an earlier span gives back is gone"
    assert SpanLimit(None, 60).take(1 << 60, 0.0) == 0


def test_a_clock_that_goes_back_gives_no_span_twice() -> None:
    window = SpanLimit(10, 60)
    assert window.take(10, 119.0) == 0
    assert window.take(4, 120.0) == 0
    assert window.take(7, 119.9) == 1
    assert window.take(7, 120.1) == 60
    assert window.take(10, 0.0) == 0, "a clock that was wrong by more was wrong before"
    window.give_back(99, 0.0)
    assert window.take(11, 0.0) == 60, "no more comes back than was taken in all"


def test_tokens_are_held_while_an_answer_is_made_and_what_is_over_comes_back() -> None:
    account = Account(key("ann", tokens_per_day=100, sessions=2))
    with account.spending(60, 1, lambda: 10, NOON_S):
        with (
            pytest.raises(ApiError, match="not so many left") as refused,
            account.spending(41, 1, lambda: 0, NOON_S),
        ):
            pass
        assert (refused.value.status, refused.value.retry_after_s) == (429, RETRY_AFTER_S)
        with (
            account.spending(40, 1, lambda: 40, NOON_S),
            pytest.raises(ApiError, match="2 of this key's 2 answers"),
            account.spending(0, 1, lambda: 0, NOON_S),
        ):
            pass
    with (
        account.spending(50, 2, lambda: 50, NOON_S),
        pytest.raises(ApiError, match="not so many left") as refused,
        account.spending(51, 0, lambda: 0, NOON_S),
    ):
        pass
    assert refused.value.retry_after_s == 43_200, "what answers used comes back with the day"
    for most, sessions in ((101, 1), (1, 3)):
        with pytest.raises(ApiError) as never, account.spending(most, sessions, int, NOON_S):
            pass
        assert never.value.status == 400, "what never fits is not to be tried again"
    with account.spending(100, 1, lambda: 100, NOON_S + 43_200):
        pass


def client_of(gateway: PaperGateway, name: str) -> openai.AsyncOpenAI:
    url = gateway.url + "/v1"
    return openai.AsyncOpenAI(base_url=url, api_key=f"{name}-secret", max_retries=0)


async def test_each_key_has_its_quota_and_hears_when_to_come_back() -> None:
    keys = (
        key("minute", requests_per_minute=2),
        key("day", tokens_per_day=100),
        key("once", sessions=1),
    )
    config = GatewayConfig(keys=keys, now_s=lambda: NOON_S)
    async with paper_gateway(config=config) as gateway:

        async def refused(name: str, **more: Any) -> tuple[str, str]:
            async with client_of(gateway, name) as client:
                with pytest.raises(openai.RateLimitError) as error:
                    await client.completions.create(**ASKED, **more)
            assert error.value.code == "rate_limit_exceeded"
            return error.value.response.headers["Retry-After"], error.value.message

        async with client_of(gateway, "minute") as client:
            await client.completions.create(**ASKED)
            with pytest.raises(openai.NotFoundError):
                await client.completions.create(**{**ASKED, "model": "other"})
        wait, said = await refused("minute")
        assert (wait, "2 requests of this minute" in said) == ("60", True)
        async with client_of(gateway, "day") as client:
            for _ in range(2):
                used = await client.completions.create(**ASKED)
                assert used.usage is not None
                assert used.usage.total_tokens == 42
            with pytest.raises(openai.BadRequestError, match="100 a day"):
                await client.completions.create(**{**ASKED, "max_tokens": 61})
        assert (await refused("day"))[0] == "43200"
        gateway.swarm.gate = asyncio.Event()
        async with client_of(gateway, "once") as client:
            first = asyncio.create_task(client.completions.create(**ASKED))
            await until(lambda: gateway.swarm.live == 1)
            assert (await refused("once"))[0] == "5"
            gateway.swarm.gate.set()
            await first
            await client.completions.create(**ASKED)
        async with client_of(gateway, "nobody") as client:
            with pytest.raises(openai.AuthenticationError):
                await client.completions.create(**ASKED)


async def test_what_fails_costs_nothing_and_what_is_left_costs_what_came() -> None:
    config = GatewayConfig(keys=(key("day", tokens_per_day=100),), now_s=lambda: NOON_S)
    async with paper_gateway(config=config) as gateway, client_of(gateway, "day") as client:
        gateway.swarm.fails = SwarmError("gone")
        for _ in range(3):
            with pytest.raises(openai.InternalServerError):
                await client.completions.create(**ASKED)
        gateway.swarm.fails = None
        gateway.swarm.gate = asyncio.Event()
        left = asyncio.create_task(client.completions.create(**ASKED))
        await until(lambda: gateway.swarm.live == 1)
        left.cancel()
        await until(lambda: gateway.swarm.live == 0)
        gateway.swarm.gate.set()
        await until(lambda: gateway.answers.requests == 0)
        await client.completions.create(**ASKED)
        with pytest.raises(openai.RateLimitError):
            await client.completions.create(**ASKED)


async def test_keys_find_each_others_prompts_only_with_one_salt() -> None:
    keys = (key("ann"), key("bob", salt="=team"), key("eve", salt="=team"))
    async with paper_gateway(config=GatewayConfig(keys=keys)) as gateway:

        async def cached(name: str) -> int:
            async with client_of(gateway, name) as client:
                usage = (await client.completions.create(**ASKED)).usage
            assert usage is not None
            assert usage.prompt_tokens_details is not None
            return usage.prompt_tokens_details.cached_tokens or 0

        assert [await cached(name) for name in ("ann", "bob", "ann", "eve")] == [0, 0, 32, 32]


def test_the_log_and_the_figures_name_keys_and_tell_no_text(tmp_path: Path) -> None:
    async def scenario() -> str:
        async with paper_gateway(config=GatewayConfig(keys=(key("ann"),))) as gateway:
            async with client_of(gateway, "ann") as client:
                await client.completions.create(**{**ASKED, "prompt": "hidden words"})
                gateway.swarm.fails, gateway.swarm.fails_after = SwarmError("gone"), 1
                with pytest.raises(openai.APIError):
                    async for _ in await client.completions.create(**ASKED, stream=True):
                        pass
                with pytest.raises(openai.NotFoundError):
                    await client.completions.create(**{**ASKED, "model": "hidden\nmodel"})
            async with client_of(gateway, "hidden") as client:
                with pytest.raises(openai.AuthenticationError):
                    await client.completions.create(**ASKED)
            async with gateway.http.get(gateway.url + "/metrics") as response:
                return await response.text()

    file = tmp_path / "log"
    with command.logged(Namespace(log_requests=False, request_log=str(file))):
        figures = asyncio.run(scenario())
    assert requests.propagate
    for line in (
        'anabranch:key_responses_total{key="ann",status="200"} 2.0',
        'anabranch:key_responses_total{key="ann",status="404"} 1.0',
        'anabranch:key_generation_tokens_total{key="ann"} 3.0',
    ):
        assert line in figures, line
    log = file.read_text()
    assert "hidden" not in figures + log
    assert "secret" not in figures + log
    told = [line.split(" POST /v1/completions ")[1].split() for line in log.splitlines()[:4]]
    named = [[each for each in words if "=" in each] for words in told]
    assert [(words[0], *some[:2], some[-1]) for words, some in zip(told, named, strict=True)] == [
        ("200", "key=ann", "model=brook", "outcome=length"),
        ("200", "key=ann", "model=brook", "outcome=failed"),
        ("404", "key=ann", "model=-", "outcome=refused"),
        ("401", "key=-", "model=-", "outcome=refused"),
    ]
    assert named[1][2:5] == ["in=40", "cached=0", "out=1"]
    assert float(named[1][5].removeprefix("first=")) >= 0
    assert named[2][2:6] == ["in=0", "cached=0", "out=0", "first=-"]


def test_a_log_that_cannot_be_written_is_said_at_the_start(tmp_path: Path) -> None:
    with (
        pytest.raises(UserError, match="--request-log"),
        command.logged(Namespace(log_requests=False, request_log=str(tmp_path))),
    ):
        pass
    assert logging.getLogger(requests.name).propagate
