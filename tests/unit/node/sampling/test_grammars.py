"""Answers under a grammar: valid, the same after a replay, and no stranger's grammar does harm."""

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from llguidance import LLMatcher, LLTokenizer

from dht.grammars.trial import limits
from dht.grammars.trials import GrammarTrials, TrialLimits
from dht.messages.session import RefusalCode, Sampling
from node.sampling.grammar import GrammarError, GrammarState
from node.sampling.grammars import GRAMMARS, Grammars
from node.sampling.penalties import SamplingRow
from node.sampling.sampler import draw_rows
from node.sampling.token_history import TokenHistory
from testing.paths import ROOT

MODEL = ROOT / "models" / "brook"
VOCAB, EOS = 2048, 1
SCHEMAS = 500
WORDS = ("name", "a", "größe", "x y", "id", "")


def sampling(grammar: str, **options: Any) -> Sampling:
    return Sampling(grammar=grammar.encode(), stop_token_ids=(EOS,), **options)


def brook() -> Grammars:
    patient = GrammarTrials(TrialLimits(answer_s=60.0))
    return Grammars(MODEL, VOCAB, {"eos_token_id": EOS}, patient)


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    return LLTokenizer((MODEL / "tokenizer.json").read_text(), n_vocab=VOCAB, eos_token=EOS)


def state(tokenizer: LLTokenizer, grammar: str) -> GrammarState:
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits())
    assert not matcher.is_error(), matcher.get_error()
    return GrammarState(matcher, (EOS,))


def drawn(history: TokenHistory, options: Sampling, position: int) -> int:
    """The next token of a model whose weights are chance: its logits follow from the position."""
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(position))
    return draw_rows(logits, [SamplingRow(sampling=options, position=position, history=history)])[0]


def answer(
    tokenizer: LLTokenizer, options: Sampling, *, seed: int, tokens: int = 2000
) -> list[int]:
    history = TokenHistory()
    history.grammar = state(tokenizer, options.grammar.decode())
    found: list[int] = []
    while not found or found[-1] != EOS:
        assert len(found) < tokens, "the answer does not end"
        found.append(drawn(history, options, seed + len(found)))
        history.add(found[-1])
    return found[:-1]


def schema(chance: random.Random, depth: int = 0) -> dict[str, Any]:
    """A schema whose answers are short, so that a model without sense ends them, too."""
    leaf = depth >= 3
    match (
        chance.choice(("string", "integer", "enum", "boolean", "pattern", "number", "null"))
        if leaf
        else chance.choice(("object", "object", "array", "anyOf", "enum", "ref", "string"))
    ):
        case "object":
            names = chance.sample(WORDS, chance.randint(0, 4))
            return {
                "type": "object",
                "properties": {name: schema(chance, depth + 1) for name in names},
                "required": [name for name in names if chance.random() < 0.7],
                "additionalProperties": False,
            }
        case "array":
            least = chance.randint(0, 2)
            return {
                "type": "array",
                "items": schema(chance, depth + 1),
                "minItems": least,
                "maxItems": least + chance.randint(0, 2),
            }
        case "anyOf":
            return {"anyOf": [schema(chance, depth + 1) for _ in range(chance.randint(1, 3))]}
        case "ref":
            return (
                {"$defs": {"it": schema(chance, 3)}, "$ref": "#/$defs/it"}
                if not depth
                else {"const": chance.choice(("c", 7, None, [1], {"k": "v"}))}
            )
        case "enum":
            return {"enum": chance.sample(["red", 3, None, True, 'ünder " it', -1.5], 3)}
        case "integer":
            least = chance.randint(-500, 500)
            return {"type": "integer", "minimum": least, "maximum": least + chance.randint(0, 900)}
        case "number":
            return {"type": "number", "minimum": 0, "maximum": chance.randint(1, 99)} | {
                "enum": [0.5, 1]
            }
        case "string":
            return {"type": "string", "minLength": chance.randint(0, 2), "maxLength": 6}
        case "pattern":
            return {"type": "string", "pattern": chance.choice(("^[a-z]{2,4}$", "^\\d{3}-\\d$"))}
        case other:
            return {"type": other}


def test_random_schemas_are_answered_validly(tokenizer: LLTokenizer) -> None:
    chance = random.Random(5)
    for at in range(SCHEMAS):
        asked = schema(chance)
        options = sampling(
            f"start: %json {json.dumps({**asked, 'x-guidance': {'whitespace_flexible': False}})}",
            temperature=chance.choice((0.0, 1.0)),
            seed=at,
        )
        text = tokenizer.decode_str(answer(tokenizer, options, seed=at << 20))
        jsonschema.validate(json.loads(text), asked)


async def test_an_answer_resumed_anywhere_is_the_same(tokenizer: LLTokenizer) -> None:
    options = sampling(
        'start: %json {"type":"object","properties":{"a":{"type":"string","maxLength":9},'
        '"b":{"type":"integer","maximum":99}},"required":["a","b"],"additionalProperties":false}',
        temperature=1.5,
        seed=3,
    )
    whole = answer(tokenizer, options, seed=1000)
    assert len(whole) > 5

    async def resumed(grammars: Grammars, kept: int) -> list[int]:
        history = TokenHistory(whole[:kept], answered=kept)
        history.grammar = await grammars.state("client", options, whole[:kept])
        found = whole[:kept]
        while (token_id := drawn(history, options, 1000 + len(found))) != EOS:
            found.append(token_id)
            history.add(token_id)
        return found

    grammars = brook()
    for kept in range(len(whole) + 1):
        assert await resumed(grammars, kept) == whole


def test_rows_without_a_grammar_are_drawn_as_before(tokenizer: LLTokenizer) -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(1))
    plain = SamplingRow(sampling=Sampling(stop_token_ids=(EOS,)), position=4)
    chosen = SamplingRow(sampling=Sampling(temperature=1.0, seed=4), position=4)
    alone = draw_rows(logits, [plain, plain, chosen])
    history = TokenHistory()
    history.grammar = state(tokenizer, 'start: "yes" | "no"')
    bound = SamplingRow(sampling=sampling('start: "yes" | "no"'), position=4, history=history)
    beside = draw_rows(logits, [plain, bound, chosen])
    assert (beside[0], beside[2]) == (alone[0], alone[2])
    assert int(torch.argmax(logits[0])) == alone[0]
    assert tokenizer.decode_str([beside[1]])[0] in "yn"


def test_a_grammar_outweighs_every_other_option(tokenizer: LLTokenizer) -> None:
    options = sampling(
        'start: "yes" | "no"',
        min_new_tokens=50,
        logit_bias=((900, 1000.0),),
        temperature=2.0,
        top_k=1,
    )
    text = tokenizer.decode_str(answer(tokenizer, options, seed=5))
    assert text in {"yes", "no"}


def test_a_forbidden_token_in_the_history_leaves_stops_alone(tokenizer: LLTokenizer) -> None:
    found = state(tokenizer, 'start: "yes"')
    found.add(700)
    row = np.zeros(VOCAB, np.float32)
    found.restrict(row)
    assert np.flatnonzero(row == 0).tolist() == [EOS]


def test_stops_outside_the_vocabulary_bar_nothing(tokenizer: LLTokenizer) -> None:
    found = GrammarState(LLMatcher(tokenizer, 'start: ""'), (VOCAB + 5,))
    row = np.zeros(VOCAB, np.float32)
    for _ in range(3):
        found.restrict(row)
        assert np.isfinite(row).any()
        found.add(EOS)


HOSTILE = {
    "rules a thousand deep": "\n".join(
        ["start: a0", *(f"a{at}: a{at + 1}" for at in range(4000)), 'a4000: "x"']
    ),
    "terminals a thousand deep": "\n".join(
        ["start: A0", *(f'A{at}: "(" A{at + 1}' for at in range(3400)), 'A3400: "x"']
    ),
    "repeats of repeats": "start: /((((a{100}){100}){100}){100})/",
    "an intersection that multiplies": "start: X\nX: "
    + " & ".join(f"/.*a.{{{at}}}b.*/" for at in range(5, 40)),
    "patterns that multiply": "start: %json "
    + json.dumps(
        {"allOf": [{"type": "string", "pattern": f".*a.{{{at}}}b.*"} for at in range(10, 40)]}
    ),
    "a large divisor": 'start: %json {"type": "integer", "multipleOf": 999983}',
    "a schema that multiplies": "start: %json "
    + json.dumps(
        {
            "allOf": [
                {"anyOf": [{"properties": {f"p{a}_{b}": {"type": "integer"}}} for b in range(4)]}
                for a in range(14)
            ]
        }
    ),
    "brackets without end": "start: " + "(" * 20_000 + '"a"' + ")" * 20_000,
    "a schema nested without end": "start: %json " + '{"not":' * 8000 + "{}" + "}" * 8000,
    "a circle": 'start: A\nA: "x" A',
    "no grammar": "{]",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE)
async def test_a_hostile_grammar_is_refused_and_costs_its_own_process_alone(
    name: str,
) -> None:
    grammars = brook()
    with pytest.raises(GrammarError) as refused:
        await grammars.state("stranger", sampling(HOSTILE[name]), ())
    assert refused.value.code is RefusalCode.BAD_REQUEST
    assert str(refused.value).startswith("the grammar: ")
    assert len(str(refused.value)) <= 400
    good = await grammars.state("client", sampling('start: "yes"'), ())
    row = np.zeros(VOCAB, np.float32)
    good.restrict(row)
    assert 0 < np.count_nonzero(row == 0) < 10


def test_a_grammar_is_read_once_for_all_who_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> int:
        grammars, tried = brook(), 0

        async def counted(*_: object) -> str:
            nonlocal tried
            tried += 1
            await asyncio.sleep(0)
            return ""

        monkeypatch.setattr(GrammarTrials, "_try", counted)
        asked = sampling('start: "yes"')
        await asyncio.gather(*(grammars.state(f"client {at}", asked, ()) for at in range(20)))
        await grammars.state("another", asked, ())
        return tried

    assert asyncio.run(scenario()) == 1


async def test_who_was_answered_here_is_read_before_a_crowd_of_strangers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grammars, gate = brook(), asyncio.Event()

    async def held(_: object, grammar: bytes, *__: object) -> str:
        if b"stranger" in grammar:
            await gate.wait()
        return ""

    monkeypatch.setattr(GrammarTrials, "_try", held)
    for at in range(GRAMMARS.worked_tokens + 1):
        state = await grammars.state("client", sampling('start: "x"+'), ())
        state.add(at)
    crowd = [
        asyncio.create_task(
            grammars.state(f"stranger {at}", sampling(f'start: "stranger {at}"'), ())
        )
        for at in range(40)
    ]
    await asyncio.sleep(0)
    await grammars.state("client", sampling('start: "y"'), ())  # none of theirs has ended
    gate.set()
    found = await asyncio.gather(*crowd, return_exceptions=True)
    refused = [each for each in found if isinstance(each, GrammarError)]
    assert 0 < len(refused) < len(crowd)
    assert {each.code for each in refused} == {RefusalCode.TOO_MANY}


async def test_a_peer_without_a_tokenizer_refuses_by_name(tmp_path: Path) -> None:
    with pytest.raises(GrammarError, match="no tokenizer for grammars") as refused:
        await Grammars(tmp_path, VOCAB, {}).state("client", sampling('start: "x"'), ())
    assert refused.value.code is RefusalCode.NOT_HELD
