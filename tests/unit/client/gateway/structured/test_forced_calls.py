"""A forced call is a call, in every way to call, whatever the tokenizer makes of its marks."""

import json
import random
import re
from functools import cache
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from client.gateway.structured.answer_reader import AnswerPart, AnswerReader
from client.gateway.structured.call_formats import CALL_FORMATS, CallFormat, call_format
from client.gateway.structured.calls import Call
from client.gateway.structured.calls_grammar import calls_grammar
from client.gateway.structured.channels import MESSAGES, TAGGED_THOUGHTS, Channels
from client.text.tokenizer import Tokenizer
from dht.grammars.trial import fault_of, limits
from testing.paths import ROOT
from tests.examples import seeds
from tests.unit.client.gateway.structured.call_samples import WRITTEN, template_of, written_call

MODEL = ROOT / "models" / "brook"
EOS = 1
SCHEMA: dict[str, Any] = {
    "type": "object",
    "$defs": {
        "Unit": {"type": "string", "enum": ["C", "F"]},
        "Place": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 4},
                "near": {"anyOf": [{"$ref": "#/$defs/Unit"}, {"type": "null"}]},
                "unit": {"$ref": "#/$defs/Unit"},
            },
            "required": ["name", "near"],
            "additionalProperties": False,
        },
    },
    "properties": {
        "city": {"type": "string", "minLength": 1, "maxLength": 6},
        "days": {"type": "integer", "minimum": 0, "maximum": 9},
        "unit": {"$ref": "#/$defs/Unit"},
        "place": {"$ref": "#/$defs/Place"},
        "note": {"type": "string", "maxLength": 3},
    },
    "required": ["city", "days", "place"],
    "additionalProperties": False,
}
FUNCTIONS = [{"name": "weather", "parameters": SCHEMA}, {"name": "clock"}]
TAGS = re.compile(r"<[^<>{}=\s]+>|\[[A-Z_]+\]")
ARGUMENTS = {"city": "Oslo", "days": 3, "place": {"name": "a", "near": None}}


def test_every_way_to_call_is_written_by_some_template() -> None:
    assert set(WRITTEN) == set(CALL_FORMATS)


def channels_of(form: CallFormat) -> Channels:
    return MESSAGES if form.in_channel else TAGGED_THOUGHTS


def marks_of(form: CallFormat) -> frozenset[str]:
    return form.marks | channels_of(form).marks


@cache
def tokenizer(form: CallFormat, kind: str) -> tuple[Tokenizer, LLTokenizer, int]:
    """One whose marks are ``bytes``, ``added`` or ``special`` tokens, as a client has it and as a
    stage, and its number of tokens."""
    backend = Backend.from_file(str(MODEL / "tokenizer.json"))
    tags = sorted({tag for mark in marks_of(form) for tag in TAGS.findall(mark)})
    if kind != "bytes":
        special = kind == "special"
        backend.add_tokens([AddedToken(tag, special=special, normalized=False) for tag in tags])
    size = backend.get_vocab_size()
    return Tokenizer(backend), LLTokenizer(backend.to_str(), n_vocab=size, eos_token=EOS), size


def named(form: CallFormat, kind: str) -> dict[str, str]:
    """The terms of the marks that a grammar has to name."""
    ids = tokenizer(form, kind)[0].mark_tokens(marks_of(form))
    return {mark: f"<[{token_id}]>" for mark, token_id in ids.items()}


def grammar_of(form: CallFormat, kind: str, **options: Any) -> str:
    channels = channels_of(form)
    given: dict[str, Any] = {"required": True, "parallel": False, "channels": channels, **options}
    return calls_grammar(form, FUNCTIONS, marks=named(form, kind), **given)


def drawn(form: CallFormat, kind: str, grammar: str, seed: int) -> str:
    """The text of an answer whose every token is drawn from those that the grammar allows."""
    text, stage, size = tokenizer(form, kind)
    matcher = LLMatcher(stage, grammar, log_level=0, limits=limits())
    chance, found = random.Random(seed), list[int]()
    while not matcher.is_stopped():
        assert not matcher.is_error(), matcher.get_error()
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little")[:size])
        token_id = EOS if EOS in allowed else int(chance.choice(allowed))
        if token_id == EOS:
            break
        matcher.consume_token(token_id)
        found.append(token_id)
        assert len(found) < 2000
    return text.showing(tuple(named(form, kind))).decode(found)


def parts_of(form: CallFormat, text: str) -> list[AnswerPart]:
    channels = MESSAGES if form.in_channel else None
    reader = AnswerReader(form, channels, parameters={"weather": SCHEMA})
    return [*reader.push(text), *reader.flush()]


def follows(form: CallFormat, kind: str, grammar: str, text: str) -> bool:
    client, stage, _ = tokenizer(form, kind)
    matcher = LLMatcher(stage, grammar, log_level=0, limits=limits())
    assert not matcher.is_error(), matcher.get_error()
    ids = list(client.encode(text, special_tokens=False))
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize("kind", ["bytes", "added", "special"])
@pytest.mark.parametrize("form", CALL_FORMATS, ids=lambda form: form.title)
def test_a_forced_call_is_a_call(form: CallFormat, kind: str) -> None:
    grammar = grammar_of(form, kind)
    assert fault_of(grammar) == ""
    for seed in seeds(2):
        text = drawn(form, kind, grammar, seed)
        (call,) = parts_of(form, text)
        assert isinstance(call, Call), text
        if call.name == "weather":
            jsonschema.validate(json.loads(call.arguments), SCHEMA)


@pytest.mark.parametrize("kind", ["bytes", "added", "special"])
@pytest.mark.parametrize("form", CALL_FORMATS, ids=lambda form: form.title)
def test_calls_are_read_and_forced_as_the_template_writes_them(form: CallFormat, kind: str) -> None:
    assert call_format(template_of(form)) is form
    text = written_call(form, "weather", ARGUMENTS)
    assert parts_of(form, text) == [Call(name="weather", arguments=json.dumps(ARGUMENTS))]
    assert follows(form, kind, grammar_of(form, kind), text)
    for parallel in (True, False):
        free = grammar_of(form, kind, required=False, parallel=parallel)
        said = MESSAGES.says_at_once if form.in_channel else ""
        assert follows(form, kind, free, text)
        assert follows(form, kind, free, f"{said}It is late.")
        assert not follows(form, kind, free, text.replace("city", "town"))


@pytest.mark.parametrize("kind", ["bytes", "added", "special"])
@pytest.mark.parametrize("form", CALL_FORMATS, ids=lambda form: form.title)
def test_thoughts_may_stand_before_calls_and_text_that_are_not_demanded(
    form: CallFormat, kind: str
) -> None:
    before, behind = channels_of(form).thoughts
    call = written_call(form, "weather", ARGUMENTS)
    said = f"{MESSAGES.says_at_once if form.in_channel else ''}It is late."
    grammar = grammar_of(form, kind, required=False)
    assert fault_of(grammar) == ""
    for answer in (call, said):
        assert follows(form, kind, grammar, f"{before}hm{behind}{answer}")
    if not form.in_channel:
        opened = grammar_of(form, kind, required=False, opened=True)
        assert fault_of(opened) == ""
        for answer in (call, said):
            assert follows(form, kind, opened, f"hm{behind}\n\n{answer}")
    assert not follows(form, kind, grammar_of(form, kind), f"{before}hm{behind}{call}")


@pytest.mark.parametrize("kind", ["bytes", "added", "special"])
@pytest.mark.parametrize("form", CALL_FORMATS, ids=lambda form: form.title)
def test_an_answer_is_calls_or_in_the_format(form: CallFormat, kind: str) -> None:
    says = MESSAGES.says_at_once if form.in_channel else ""
    for otherwise in ('%json {"type": "integer"}', "%lark {\nstart: /[0-9]+/\n}"):
        grammar = grammar_of(form, kind, required=False, otherwise=otherwise)
        assert follows(form, kind, grammar, f"{says}17")
        assert not follows(form, kind, grammar, f"{says}It is late.")
    assert follows(form, kind, grammar, written_call(form, "weather", ARGUMENTS))
