"""An answer in parts reads as if it was one, up to the model's context."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any, cast

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers.decoders import Metaspace
from tokenizers.models import WordLevel

from client.answer.answer import Answer, Piece
from client.answer.generation import GenerationOptions
from client.swarm.long_answer import LongAnswer, can_go_on
from client.swarm.swarm import Swarm
from client.text.tokenizer import Tokenizer
from dht.errors import SwarmError
from dht.messages.session import FinishReason

BROOK = Path(__file__).parents[4] / "models" / "brook"
PROMPT = (1, 2, 3)
TEXT = "The river — “déjà vu” — goes on and on, Zoë said, until it meets the sea."


class PaperSwarm:
    """A swarm that says the tokens of ``script`` at their positions, and then ends."""

    def __init__(self, script: tuple[int, ...], *, parts_max: int = 1000) -> None:
        self.script = script
        self.asked: list[tuple[int, GenerationOptions]] = []
        self._parts_max = parts_max

    def begin(self, prompt: tuple[int, ...], options: GenerationOptions) -> Any:
        done = len(prompt) - len(PROMPT)
        assert prompt == (*PROMPT, *self.script[:done])
        self.asked.append((len(prompt), options))
        if len(self.asked) > self._parts_max:
            raise SwarmError("the swarm is full")
        return PaperGeneration(self.script[done:], prompt, options)


class PaperGeneration:
    on_route: Callable[..., None] | None = None

    def __init__(
        self, rest: tuple[int, ...], prompt: tuple[int, ...], options: GenerationOptions
    ) -> None:
        assert options.max_new_tokens is not None
        self._given = rest[: options.max_new_tokens]
        self._cut = len(self._given) == options.max_new_tokens
        self._prompt = prompt

    async def __aiter__(self) -> AsyncGenerator[Piece, None]:
        for token_id in self._given:
            yield Piece(text="?", token_ids=(token_id,))

    def answer(self) -> Answer:
        return Answer(
            text=None,
            token_ids=self._given,
            prompt_tokens=len(self._prompt),
            finish_reason=FinishReason.LENGTH if self._cut else FinishReason.STOP,
            ttft_s=0.5,
            tpot_s=0.1,
            computed_s=0.05,
            waited_s=0.0,
            route=(),
            plan_version="1.1",
            fingerprint="f",
            failovers=1,
        )


def told(
    swarm: PaperSwarm, *, context: int, first: int = 7, part: int = 5, **options: Any
) -> tuple[str, LongAnswer]:
    tokenizer = Tokenizer.load(BROOK)
    assert tokenizer is not None
    running = LongAnswer(
        cast(Swarm, swarm),
        tokenizer,
        PROMPT,
        GenerationOptions(**options),
        context_tokens=context,
        first_tokens=first,
        part_tokens=part,
    )

    async def read() -> str:
        return "".join([piece.text async for piece in running])

    return asyncio.run(read()), running


@pytest.mark.parametrize("continues", [False, True])
def test_a_text_that_goes_on_keeps_its_space(continues: bool) -> None:
    words = ("", "▁One", "▁fine", "▁day", "▁upon", "▁a")
    backend = Backend(WordLevel({word: at for at, word in enumerate(words)}, ""))
    backend.decoder = Metaspace()
    running = LongAnswer(
        cast(Swarm, PaperSwarm((4, 5))),
        Tokenizer(backend),
        PROMPT,
        GenerationOptions(),
        context_tokens=100,
        first_tokens=9,
        part_tokens=9,
        continues=continues,
    )

    async def read() -> str:
        return "".join([piece.text async for piece in running])

    assert asyncio.run(read()) == " upon a"[not continues :]


@pytest.fixture(scope="module")
def script() -> tuple[int, ...]:
    tokenizer = Tokenizer.load(BROOK)
    assert tokenizer is not None
    return tokenizer.encode(TEXT)


@pytest.mark.parametrize("part", [1, 2, 3, 5, 1000])
def test_parts_make_the_text_of_the_whole(script: tuple[int, ...], part: int) -> None:
    swarm = PaperSwarm(script)
    text, running = told(swarm, context=1000, part=part, min_new_tokens=9)
    assert text == TEXT, "also where a character was cut"
    answer = running.answer()
    assert (answer.text, answer.token_ids, answer.prompt_tokens) == (TEXT, script, len(PROMPT))
    assert (answer.finish_reason, running.cut) == (FinishReason.STOP, "")
    assert answer.failovers == len(swarm.asked)
    whole_s = answer.ttft_s + (len(script) - 1) * answer.tpot_s
    alone_s = sum(0.5 + 0.1 * max(0, count - 1) for count in counts(swarm, len(script)))
    assert whole_s == pytest.approx(alone_s)
    least = [options.min_new_tokens for _, options in swarm.asked]
    assert least[0] == 7, "no more than the part may have"
    assert least[1] == min(2, part)


def counts(swarm: PaperSwarm, script_tokens: int) -> list[int]:
    """Number of tokens of each part that had any."""
    starts = [prompt - len(PROMPT) for prompt, _ in swarm.asked]
    ends = [*starts[1:], script_tokens]
    return [max(1, end - start) for start, end in zip(starts, ends, strict=True)]


def test_it_ends_where_the_context_is_full_or_the_swarm_is(script: tuple[int, ...]) -> None:
    text, running = told(PaperSwarm(script), context=len(PROMPT) + 14)
    assert TEXT.startswith(text.rstrip("\ufffd"))
    assert len(running.answer().token_ids) == 14
    assert running.cut == "the model's context of 17 tokens is full"
    _, running = told(PaperSwarm(script, parts_max=2), context=1000)
    assert (len(running.answer().token_ids), running.cut) == (12, "the swarm is full")
    with pytest.raises(SwarmError):
        told(PaperSwarm(script, parts_max=0), context=1000)


def test_what_looks_back_at_the_answer_is_not_cut_in_parts() -> None:
    assert can_go_on(GenerationOptions(temperature=0.8, repetition_penalty=1.1))
    for options in (
        {"max_new_tokens": 9},
        {"stop": ("x",)},
        {"grammar": "start: 'a'"},
        {"presence_penalty": 0.5},
        {"frequency_penalty": -0.5},
    ):
        assert not can_go_on(GenerationOptions(**options))  # type: ignore[arg-type]
