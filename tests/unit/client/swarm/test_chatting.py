"""Conversations by the model's own template; swarms that notebooks enter and leave."""

import asyncio
import json
import shutil
import threading
from argparse import Namespace
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, get_type_hints

import pytest

import client.generate as ask
from client import BlockingSwarm, GenerationOptions, Swarm
from client.answer.generation import NamedOptions
from client.swarm.swarm import Connecting
from client.text.tokenizer import ModelText
from dht.errors import UserError
from testing.clock import run_virtual
from testing.paths import ROOT
from tests.sim.paper_swarm import NAME_ALONE, answer_of, paper_swarm
from tests.templates import LLAMA3, QWEN3

HELLO = [{"role": "user", "content": "Hello"}]


def text_with(template: str | None, directory: Path) -> ModelText:
    """The bundled model's text side, with another template."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ROOT / "models" / "brook" / name, directory / name)
    if template is not None:
        path = directory / "tokenizer_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": template}))
    return ModelText.load(NAME_ALONE.name, directory, "")


def ids_of(text: ModelText, rendered: str) -> tuple[int, ...]:
    assert text.tokenizer is not None
    return text.tokenizer.encode(rendered, special_tokens=False)


@asynccontextmanager
async def alone(text: ModelText) -> AsyncIterator[Swarm]:
    """A client of a swarm of one peer, which is entered and left with it."""
    async with paper_swarm((0, 8)) as swarm, swarm.client(text=text) as client:
        yield client


@pytest.mark.virtual(limit_s=600)
async def test_a_conversation_is_written_by_the_models_template(tmp_path: Path) -> None:
    text = text_with(QWEN3, tmp_path)
    expected = ids_of(text, "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n")

    async with alone(text) as swarm:
        answer = await swarm.chat(HELLO, max_new_tokens=4)
        assert answer.prompt_tokens == len(expected)
        assert answer.token_ids == answer_of(expected, 4)
        pieces = [piece async for piece in swarm.stream_chat("Hello", max_new_tokens=4)]
        assert sum((piece.token_ids for piece in pieces), ()) == answer.token_ids
        prefilled = [*HELLO, {"role": "assistant", "content": "Good"}]
        continued = await swarm.chat_prompt(prefilled)
        assert continued == ids_of(
            text, "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\nGood"
        )


@pytest.mark.virtual(limit_s=600)
async def test_a_developers_message_stands_in_the_prompt(tmp_path: Path) -> None:
    async with alone(text_with(QWEN3, tmp_path)) as swarm:
        said = [{"role": "developer", "content": "Be short"}, *HELLO]
        assert swarm.text.tokenizer is not None
        prompt = swarm.text.tokenizer.decode(await swarm.chat_prompt(said))
        assert "Be short" in prompt


@pytest.mark.virtual(limit_s=600)
@pytest.mark.parametrize(
    "messages", [[], [{"role": "user"}], [{"role": "user", "content": 1}], ["Hello"], 7]
)
async def test_what_is_no_conversation_is_refused_by_name(messages: Any, tmp_path: Path) -> None:
    async with alone(text_with(QWEN3, tmp_path)) as swarm:
        with pytest.raises(UserError, match="messages"):
            await swarm.chat(messages)


@pytest.mark.virtual(limit_s=600)
async def test_a_model_without_a_template_says_so(tmp_path: Path) -> None:
    async with alone(text_with(None, tmp_path)) as swarm:
        with pytest.raises(UserError, match="no chat template"):
            await swarm.chat(HELLO)


@pytest.mark.parametrize("template", [QWEN3, LLAMA3, None])
@pytest.mark.parametrize("flags", [["--prompt", "Hello"], ["--prompt", "Hello", "--raw"]])
def test_ask_chats_where_the_model_can_and_nobody_says_otherwise(
    template: str | None,
    flags: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = text_with(template, tmp_path)
    monkeypatch.setattr("sys.argv", ["ask", "--initial-peers", "/ip4/1.2.3.4/tcp/1/p2p/x", *flags])
    monkeypatch.setattr(ask, "settle_swarm", lambda *_, **__: None)
    monkeypatch.setattr(ask, "remember_swarm", lambda *_: None)
    monkeypatch.setattr(ask, "settled_swarm", lambda *_, **__: alone(text))
    arguments: Namespace = ask.parse()
    arguments.json, arguments.max_new_tokens = True, 4
    run_virtual(ask.main(arguments), limit_s=600)
    shown = json.loads(capsys.readouterr().out)
    assert text.tokenizer is not None
    plain = len(text.tokenizer.encode("Hello"))
    assert (shown["prompt_tokens"] > plain) is (template is not None and "--raw" not in flags)


@pytest.mark.virtual(limit_s=600)
async def test_an_awaited_swarm_stays_until_it_is_closed(tmp_path: Path) -> None:
    text = text_with(QWEN3, tmp_path)
    connecting: Connecting[Swarm] = Connecting(lambda: alone(text))
    # Each in a task of its own, like the cells of a notebook.
    swarm = await asyncio.create_task(_awaited(connecting))
    answer = await asyncio.create_task(swarm.chat(HELLO, max_new_tokens=2))
    assert len(answer.token_ids) == 2
    await asyncio.create_task(swarm.close())
    await swarm.close()
    assert not [t for t in asyncio.all_tasks() if t.get_name() == "anabranch client"]


async def _awaited(connecting: Connecting[Swarm]) -> Swarm:
    return await connecting


@asynccontextmanager
async def _nobody() -> AsyncIterator[Swarm]:
    raise UserError("nobody is there")
    yield


def test_why_a_swarm_was_not_entered_is_raised() -> None:
    async def scenario() -> None:
        with pytest.raises(UserError, match="nobody is there"):
            await Connecting(_nobody)

    run_virtual(scenario(), limit_s=60)
    before = threading.active_count()
    with pytest.raises(UserError, match="nobody is there"):
        BlockingSwarm(_nobody())
    assert threading.active_count() == before


def test_a_blocking_swarm_needs_no_with(tmp_path: Path) -> None:
    swarm = BlockingSwarm(alone(text_with(QWEN3, tmp_path)))
    answer = swarm.chat(HELLO, max_new_tokens=4)
    pieces = list(swarm.stream_chat(HELLO, max_new_tokens=4))
    assert sum((piece.token_ids for piece in pieces), ()) == answer.token_ids
    swarm.close()
    swarm.close()
    with pytest.raises(RuntimeError, match="closed"):
        swarm.generate("Hello")
    assert not [t for t in threading.enumerate() if t.name == "anabranch client"]


def test_editors_know_every_option() -> None:
    options = get_type_hints(GenerationOptions)
    assert get_type_hints(NamedOptions) == options
    for method in (Swarm.generate, Swarm.stream, Swarm.chat, BlockingSwarm.generate):
        assert "NamedOptions" in str(method.__annotations__["named"])


@pytest.mark.virtual(limit_s=60)
@pytest.mark.parametrize("options", [{"max_new_tokens": 2}, 64])
async def test_options_of_another_kind_are_named(options: Any, tmp_path: Path) -> None:
    async with alone(text_with(None, tmp_path)) as swarm:
        with pytest.raises(TypeError, match="GenerationOptions"):
            await swarm.generate([1], options)
