"""Calls and thoughts in answers: the same however the text is cut."""

import json
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from client.gateway.structured.tools import (
    AnswerPart,
    AnswerReader,
    Call,
    Thought,
    ToolFormat,
    _joined,
    tool_format,
)

ARGUMENTS = {"city": 'Köln "</tool_call" [TOOL', "n": [1, {"a": None}]}
CALL = Call(name="weather", arguments=json.dumps(ARGUMENTS, ensure_ascii=False))
JSON = json.dumps({"name": "weather", "arguments": ARGUMENTS}, ensure_ascii=False)
BARE = json.dumps({"name": "weather", "parameters": ARGUMENTS}, ensure_ascii=False)

ANSWERS: list[tuple[ToolFormat | None, str, list[AnswerPart]]] = [
    (ToolFormat.TAGS, "plain < text <tool", ["plain < text <tool"]),
    (ToolFormat.TAGS, f"<tool_call>\n{JSON}\n</tool_call>", [CALL]),
    (
        ToolFormat.TAGS,
        f"I look. <tool_call>{JSON}</tool_call>\n<tool_call>{JSON}</tool_call>",
        ["I look. ", CALL, "\n", CALL],
    ),
    (ToolFormat.TAGS, f"<tool_call>{JSON}", [CALL]),
    (ToolFormat.TAGS, "<tool_call>no</tool_call> so", ["<tool_call>no</tool_call> so"]),
    (
        ToolFormat.TAGS,
        f"<think>hm </thin</think><tool_call>{JSON}</tool_call>",
        [Thought(text="hm </thin"), CALL],
    ),
    (ToolFormat.MISTRAL, f"[TOOL_CALLS][{JSON}, {JSON}]", [CALL, CALL]),
    (ToolFormat.MISTRAL, f"So: [TOOL_CALLS] [{JSON}]", ["So: ", CALL]),
    (ToolFormat.MISTRAL, f"[TOOL_CALLS]weather[ARGS]{json.dumps(ARGUMENTS)}", [CALL]),
    (
        ToolFormat.MISTRAL,
        f"[TOOL_CALLS]weather{json.dumps(ARGUMENTS)}[TOOL_CALLS]weather{json.dumps(ARGUMENTS)}",
        [CALL, CALL],
    ),
    (ToolFormat.MISTRAL, "a [TOOL", ["a [TOOL"]),
    (ToolFormat.MISTRAL, "[TOOL_CALLS] none", ["[TOOL_CALLS] none"]),
    (ToolFormat.BARE, BARE, [CALL]),
    (ToolFormat.BARE, f" <|python_tag|>{BARE}; {BARE}", [CALL, CALL]),
    (ToolFormat.BARE, f"See {BARE}", [f"See {BARE}"]),
    (ToolFormat.BARE, '{"a": 1}', ['{"a": 1}']),
    (None, f"<tool_call>{JSON}</tool_call>", [f"<tool_call>{JSON}</tool_call>"]),
    (None, "<think>why</think>because", [Thought(text="why"), "because"]),
    (None, "<think>why", [Thought(text="why")]),
    (None, "<thin", ["<thin"]),
]


def read(form: ToolFormat | None, pieces: Sequence[str]) -> list[AnswerPart]:
    reader = AnswerReader(form, thinks=True)
    found: list[AnswerPart] = []
    for piece in pieces:
        found += reader.push(piece)
    return _joined([*found, *reader.flush()])


@pytest.mark.property
@pytest.mark.parametrize(("form", "text", "parts"), ANSWERS)
@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_any_cut_of_an_answer_gives_the_same_parts(
    form: ToolFormat | None, text: str, parts: list[AnswerPart], data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(text) - 1)))))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(form, pieces) == parts
    assert read(form, list(text)) == parts
    assert read(form, [text]) == parts


@pytest.mark.property
@given(
    form=st.sampled_from([*ToolFormat, None]),
    pieces=st.lists(
        st.sampled_from(
            [
                "<tool_call>",
                "</tool_call>",
                "[TOOL_CALLS]",
                "[",
                "<",
                "{",
                "}",
                JSON,
                BARE,
                " ",
                "<think>",
                "</think>",
                "<|python_tag|>",
                "a",
                ";",
                "\n",
                "[ARGS]",
                "</",
            ]
        ),
        max_size=8,
    ),
)
@settings(max_examples=300, deadline=None)
def test_no_cut_changes_what_strange_answers_are(
    form: ToolFormat | None, pieces: list[str]
) -> None:
    assert read(form, pieces) == read(form, list("".join(pieces))) == read(form, ["".join(pieces)])


def test_text_leaves_as_soon_as_it_cannot_become_a_mark() -> None:
    reader = AnswerReader(ToolFormat.TAGS, thinks=False)
    assert reader.push("a <to") == ["a "]
    assert reader.push("y") == ["<toy"]


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("{{ tools }}<tool_call>", ToolFormat.TAGS),
        ("{{ tools }}<tool_call><function=x>", None),
        ("[AVAILABLE_TOOLS][TOOL_CALLS]", ToolFormat.MISTRAL),
        ('{% if tools %}{"name": function name, "parameters": …}', ToolFormat.BARE),
        ("{{ tools }}<|python_tag|>", ToolFormat.BARE),
        ("{{ messages }}", None),
    ],
)
def test_the_way_to_call_is_in_the_template(template: str, form: ToolFormat | None) -> None:
    assert tool_format(template) is form
