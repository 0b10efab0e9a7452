"""Messages with heads: thoughts, text and calls, the same however an answer is cut."""

import json
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from client.gateway.structured.answer_reader import AnswerPart, AnswerReader, Thought, _joined
from client.gateway.structured.call_formats import CHANNEL_JSON, CallFormat, call_format
from client.gateway.structured.calls import Call
from client.gateway.structured.channels import (
    MESSAGES,
    SEED_THOUGHTS,
    TAGGED_THOUGHTS,
    Channels,
    channels_of,
)
from tests.examples import examples

TEMPLATE = """
{%- if tools -%}{{ "Calls to these tools must go to the commentary channel: 'functions'." }}{%- endif -%}
{{- "<|start|>assistant to=" }}{{- "functions." + tool_call.name + "<|channel|>commentary " }}
{{- "json<|message|>" }}{{- tool_call.arguments|tojson }}{{- "<|call|>" }}
{{- "<|start|>assistant<|channel|>analysis<|message|>" + message.thinking + "<|end|>" }}
"""  # noqa: E501
ANALYSIS = "<|channel|>analysis<|message|>Think <|en.<|end|>"
FINAL = "<|channel|>final<|message|>Say so."
ARGUMENTS = json.dumps({"city": "Köln <|mess"}, ensure_ascii=False)
CALL = Call(name="weather", arguments=ARGUMENTS)
TO = "to=functions.weather"
CONSTRAINED = f"<|channel|>commentary {TO} <|constrain|>json<|message|>{ARGUMENTS}"
AS_SHOWN = f"{TO}<|channel|>commentary json<|message|>{ARGUMENTS}"
START = "<|start|>assistant"
THOUGHT = Thought(text="Think <|en.")

ANSWERS: list[tuple[str, list[AnswerPart]]] = [
    (ANALYSIS + START + FINAL, [THOUGHT, "Say so."]),
    (f"{ANALYSIS}{START}{FINAL}<|return|>", [THOUGHT, "Say so."]),
    (FINAL, ["Say so."]),
    (f"{ANALYSIS}{START}{CONSTRAINED}<|call|>", [THOUGHT, CALL]),
    (f"{ANALYSIS}{START}{CONSTRAINED}", [THOUGHT, CALL]),
    (f" {AS_SHOWN}<|call|>", [CALL]),
    (f"{ANALYSIS}{START} {AS_SHOWN}<|call|>", [THOUGHT, CALL]),
    (f"{CONSTRAINED}<|call|>{START}{CONSTRAINED}<|call|>", [CALL, CALL]),
    (
        f"{ANALYSIS}{START}<|channel|>commentary<|message|>I look.<|end|>{START}{CONSTRAINED}",
        [THOUGHT, "I look.", CALL],
    ),
    (f"{ANALYSIS}{START}{ANALYSIS}{START}{FINAL}", [Thought(text=THOUGHT.text * 2), "Say so."]),
    (
        f"<|channel|>analysis to=browser.search code<|message|>x<|call|>{START}{FINAL}",
        [Thought(text="x"), "Say so."],
    ),
    ("<|channel|>analysis<|message|>cut", [Thought(text="cut")]),
    ("<|channel|>final<|message|>", []),
    ("<|channel|>ana", []),
    (f"{ANALYSIS}<|start|>assis", [THOUGHT]),
    ("no head at all", ["no head at all"]),
    ("no head at all<|return|>", ["no head at all"]),
    ("", []),
    (
        f"<|channel|>commentary {TO}<|message|>{{no<|call|>",
        [f"<|channel|>commentary {TO}<|message|>{{no"],
    ),
    (
        f"<|channel|>commentary {TO}<|message|>[1]<|call|>{START}{FINAL}",
        [f"<|channel|>commentary {TO}<|message|>[1]Say so."],
    ),
    (
        f"<|channel|>commentary to=functions.{'w' * 65}<|message|>{{}}<|call|>",
        ["{}"],
    ),
    (f"<|channel|>{'x' * 2000}", [f"<|channel|>{'x' * 2000}"]),
    ("<|channel|>" * 400 + "final<|message|>a", ["<|channel|>" * 372 + "a"]),
]


def read(
    pieces: Sequence[str], calls: CallFormat | None = CHANNEL_JSON, opened: str | None = None
) -> list[AnswerPart]:
    reader = AnswerReader(calls, MESSAGES, opened=opened)
    found: list[AnswerPart] = []
    for piece in pieces:
        found += reader.push(piece)
    return _joined([*found, *reader.flush()])


@pytest.mark.parametrize(("text", "parts"), ANSWERS)
def test_an_answer_cut_anywhere_has_the_same_parts(text: str, parts: list[AnswerPart]) -> None:
    assert read([text]) == parts
    assert read(list(text)) == parts
    for at in range(min(len(text), 400)):
        assert read([text[:at], text[at:]]) == parts


@given(
    pieces=st.lists(
        st.sampled_from(
            [
                "<|start|>",
                "<|channel|>",
                "<|message|>",
                "<|end|>",
                "<|call|>",
                "<|",
                "assistant",
                "analysis",
                "final",
                f"commentary {TO}",
                ARGUMENTS,
                "x" * 600,
                " ",
            ]
        ),
        max_size=10,
    )
)
@examples(100)
def test_no_cut_changes_what_strange_answers_are(pieces: list[str]) -> None:
    assert read(pieces) == read(list("".join(pieces))) == read(["".join(pieces)])


def test_thoughts_and_text_leave_as_they_come() -> None:
    reader = AnswerReader(CHANNEL_JSON, MESSAGES)
    assert reader.push("<|channel|>analysis<|mess") == []
    assert reader.push("age|>Hm, <|e") == [Thought(text="Hm, ")]
    assert reader.push("nd|><|start|>assistant<|channel|>final<|message|>So") == ["So"]
    assert reader.push(" it is") == [" it is"]
    assert reader.flush() == []


def test_without_offered_functions_a_call_is_text() -> None:
    assert read([f"{CONSTRAINED}<|call|>"], None) == [ARGUMENTS]


@pytest.mark.parametrize(
    ("channels", "prompt", "opened", "text", "parts"),
    [
        (MESSAGES, "<|start|>user<|message|>Hi<|end|><|start|>assistant", None, FINAL, ["Say so."]),
        (
            MESSAGES,
            "<|start|>user<|message|>Hi<|end|><|start|>assistant<|channel|>final<|message|>So",
            "<|start|>assistant<|channel|>final",
            " it is.<|return|>",
            [" it is."],
        ),
        (
            MESSAGES,
            f"{START}<|channel|>analysis<|message|>",
            f"{START}<|channel|>analysis",
            f"a<|end|>{START}{FINAL}",
            [Thought(text="a"), "Say so."],
        ),
        (
            MESSAGES,
            f"{START}<|channel|>commentary {TO}<|message|>",
            f"{START}<|channel|>commentary {TO}",
            ARGUMENTS,
            [CALL],
        ),
        (TAGGED_THOUGHTS, "<assistant><think>\n", "", "why</think>so", [Thought(text="why"), "so"]),
        (TAGGED_THOUGHTS, "<assistant></think>", None, "so", ["so"]),
    ],
)
def test_an_answer_goes_on_where_its_prompt_ends(
    channels: Channels, prompt: str, opened: str | None, text: str, parts: list[AnswerPart]
) -> None:
    assert channels.opened_by(prompt) == opened
    calls = CHANNEL_JSON if channels is MESSAGES else None
    for pieces in ([text], list(text)):
        reader = AnswerReader(calls, channels, opened=opened)
        found = [part for piece in pieces for part in reader.push(piece)]
        assert _joined([*found, *reader.flush()]) == parts


@pytest.mark.parametrize(
    ("template", "channels"),
    [
        (TEMPLATE, MESSAGES),
        ("{{ '<think>' }}", TAGGED_THOUGHTS),
        ("{% if '</think>' in content %}", TAGGED_THOUGHTS),
        ("{% set think_begin_token = '<seed:think>' %}", SEED_THOUGHTS),
        ("{{ messages }}", None),
    ],
)
def test_how_an_answer_is_parted_is_in_the_template(
    template: str, channels: Channels | None
) -> None:
    assert channels_of(template) is channels
    assert call_format(template) is (CHANNEL_JSON if channels is MESSAGES else None)
