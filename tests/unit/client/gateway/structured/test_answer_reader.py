"""Calls and thoughts in answers: the same however the text is cut."""

import json
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from client.gateway.structured import call_pieces
from client.gateway.structured.answer_reader import (
    HELD_MAX,
    AnswerPart,
    AnswerReader,
    Thought,
    _joined,
    _Marks,
    _Place,
)
from client.gateway.structured.call_formats import (
    ACTIONS_JSON,
    BARE_JSON,
    CALL_FORMATS,
    CHANNEL_JSON,
    FENCED_JSON,
    FUNCTION_CALL_JSON,
    FUNCTION_JSON,
    FUNCTION_ROLE_JSON,
    FUNCTION_TAGS,
    INVOKE_TAGS,
    KEYS_AND_VALUES,
    LISTED_JSON,
    MARKED_JSON,
    NUMBERED_JSON,
    NUMBERED_SECTION_JSON,
    SEED_FUNCTION_TAGS,
    SEPARATED_JSON,
    TAGGED_JSON,
    CallFormat,
)
from client.gateway.structured.call_pieces import CallBegun, CallGrows
from client.gateway.structured.calls import Call
from client.gateway.structured.channels import MESSAGES, TAGGED_THOUGHTS, Channels
from tests.examples import examples
from tests.unit.client.gateway.structured.call_samples import written_call

ARGUMENTS = {"city": 'Köln "</tool_call" [TOOL', "n": [1, {"a": None}]}
CALL = Call(name="weather", arguments=json.dumps(ARGUMENTS, ensure_ascii=False))
NONE = Call(name="weather", arguments="{}")
JSON_ARGUMENTS = json.dumps(ARGUMENTS, ensure_ascii=False)
JSON = json.dumps({"name": "weather", "arguments": ARGUMENTS}, ensure_ascii=False)
BARE = json.dumps({"name": "weather", "parameters": ARGUMENTS}, ensure_ascii=False)
PARAMETERS = {"weather": {"properties": {"city": {"type": "string"}, "n": {"type": "array"}}}}

TAGGED_CALL = f"<tool_call>{JSON}</tool_call>"
KEYED = written_call(KEYS_AND_VALUES, "weather", ARGUMENTS)
DENSE = KEYED.replace("\n", "")
TAGGED = written_call(FUNCTION_TAGS, "weather", ARGUMENTS)
SEED = written_call(SEED_FUNCTION_TAGS, "weather", ARGUMENTS)
INVOKED = f"""<invoke name="weather">
<parameter name="city">{ARGUMENTS["city"]}</parameter>
<parameter name="n">[1, {{"a": null}}]</parameter>
</invoke>
"""
SEPARATED = f"<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{JSON_ARGUMENTS}<｜tool▁call▁end｜>"
FENCED = (
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n"
    f"```json\n{JSON_ARGUMENTS}\n```<｜tool▁call▁end｜>"
)
NUMBERED = "".join(
    (
        "<|tool_calls_section_begin|>",
        *(
            f"<|tool_call_begin|>functions.weather:{at}<|tool_call_argument_begin|>"
            f"{JSON_ARGUMENTS}<|tool_call_end|>"
            for at in range(2)
        ),
        "<|tool_calls_section_end|>",
    )
)
BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"


def raw(form: CallFormat, text: str) -> tuple[CallFormat, str, list[AnswerPart]]:
    """An answer whose calls are none."""
    return form, text, [text]


ANSWERS: list[tuple[CallFormat | None, str, list[AnswerPart]]] = [
    raw(TAGGED_JSON, "plain < text <tool"),
    (TAGGED_JSON, f"<tool_call>\n{JSON}\n</tool_call>", [CALL]),
    (
        TAGGED_JSON,
        f"I look. <tool_call>{JSON}</tool_call>\n<tool_call>{JSON}</tool_call>",
        ["I look. ", CALL, "\n", CALL],
    ),
    (TAGGED_JSON, f"<tool_call>{JSON}", [CALL]),
    raw(TAGGED_JSON, "<tool_call>no</tool_call> so"),
    raw(TAGGED_JSON, '<tool_call>{"name": "weather", "arguments": {"n": NaN}}</tool_call>'),
    raw(TAGGED_JSON, '<tool_call>{"name": "weather", "arguments": {"n": 1e999}}</tool_call>'),
    raw(TAGGED_JSON, '<tool_call>{"name": "two words", "arguments": {}}</tool_call>'),
    raw(TAGGED_JSON, '<tool_call>{"name": "weather", "arguments": [1]}</tool_call>'),
    *(
        (TAGGED_JSON, f'<tool_call>{{"name": "weather"{none}}}</tool_call>', [NONE])
        for none in ("", *(f', "arguments": {each}' for each in ("null", "[]", '""', '"null"')))
    ),
    raw(TAGGED_JSON, f"<tool_call>{'[' * 5000}</tool_call>"),
    (
        TAGGED_JSON,
        '<tool_call>{"name": "weather", "arguments": {"a": "\\ud800"}}</tool_call>',
        [Call(name="weather", arguments='{"a": "\\ud800"}')],
    ),
    (
        TAGGED_JSON,
        f"<think>hm </thin</think><tool_call>{JSON}</tool_call>",
        [Thought(text="hm </thin"), CALL],
    ),
    (LISTED_JSON, f"[TOOL_CALLS][{JSON}, {JSON}]", [CALL, CALL]),
    (LISTED_JSON, f"So: [TOOL_CALLS] [{JSON}]", ["So: ", CALL]),
    (LISTED_JSON, f"[TOOL_CALLS]weather[ARGS]{JSON_ARGUMENTS}", [CALL]),
    (
        LISTED_JSON,
        f"[TOOL_CALLS]weather{JSON_ARGUMENTS}[TOOL_CALLS]weather{JSON_ARGUMENTS}",
        [CALL, CALL],
    ),
    (LISTED_JSON, f"[TOOL_CALLS]weather[CALL_ID]a1B2c3D4e[ARGS]{JSON_ARGUMENTS}", [CALL]),
    (MARKED_JSON, f"So. [TOOL_CALLS]weather[ARGS]{JSON_ARGUMENTS}", ["So. ", CALL]),
    (
        MARKED_JSON,
        f"[TOOL_CALLS]weather[ARGS]{JSON_ARGUMENTS}[TOOL_CALLS]weather[ARGS]{{}}",
        [CALL, NONE],
    ),
    (MARKED_JSON, f"[TOOL_CALLS][{JSON}, {JSON}]", [CALL, CALL]),
    (MARKED_JSON, f"[TOOL_CALLS]weather{JSON_ARGUMENTS}", [CALL]),
    (NUMBERED_JSON, f"[TOOL_CALLS]weather[ARGS]{JSON_ARGUMENTS}", [CALL]),
    raw(MARKED_JSON, "[TOOL_CALLS]weather[ARGS]no"),
    raw(LISTED_JSON, "a [TOOL"),
    raw(LISTED_JSON, "[TOOL_CALLS] none"),
    (BARE_JSON, BARE, [CALL]),
    (BARE_JSON, f" <|python_tag|>{BARE}; {BARE}", [CALL, CALL]),
    raw(BARE_JSON, f"See {BARE}"),
    raw(BARE_JSON, '{"a": 1}'),
    raw(BARE_JSON, " \n "),
    (BARE_JSON, f"<think>a</think>\n{BARE}", [Thought(text="a"), CALL]),
    (KEYS_AND_VALUES, KEYED, [CALL]),
    (KEYS_AND_VALUES, f"I look.\n{DENSE}{KEYED} ", ["I look.\n", CALL, CALL, " "]),
    (KEYS_AND_VALUES, f"\n<think>so</think>\n{KEYED}", [Thought(text="so"), "\n", CALL]),
    (KEYS_AND_VALUES, "<tool_call>weather\n</tool_call>", [NONE]),
    raw(KEYS_AND_VALUES, "<tool_call>\n</tool_call>"),
    raw(KEYS_AND_VALUES, "<tool_call>two words</tool_call>"),
    raw(KEYS_AND_VALUES, f"<tool_call>{'w' * 65}</tool_call>"),
    raw(KEYS_AND_VALUES, "<tool_call>weather\n<arg_key>city</arg_key>\n</tool_call>"),
    raw(KEYS_AND_VALUES, "<tool_call>weather\n<arg_key>city<arg_value>a</arg_value></tool_call>"),
    raw(KEYS_AND_VALUES, "<tool_call>weather <arg_value>a</arg_value></tool_call>"),
    raw(KEYS_AND_VALUES, KEYED.removesuffix("</tool_call>")),
    raw(KEYS_AND_VALUES, "<tool_call>weather"),
    raw(KEYS_AND_VALUES, f"<tool_call>{JSON}</tool_call>"),
    (FUNCTION_TAGS, TAGGED, [CALL]),
    (FUNCTION_TAGS, f"I look.\n\n{TAGGED}\n{TAGGED}", ["I look.\n\n", CALL, "\n", CALL]),
    (FUNCTION_TAGS, TAGGED.replace(">\n", ">").replace("\n<", "<"), [CALL]),
    (FUNCTION_TAGS, TAGGED.removesuffix("</tool_call>"), [CALL]),
    (FUNCTION_TAGS, "<tool_call>\n<function=weather>\n</function>\n</tool_call>", [NONE]),
    (
        FUNCTION_TAGS,
        "<tool_call><function=weather></function><function=weather></function></tool_call>",
        [NONE, NONE],
    ),
    raw(FUNCTION_TAGS, TAGGED.replace("</function>", "")),
    raw(FUNCTION_TAGS, TAGGED.replace("</parameter>", "")),
    raw(FUNCTION_TAGS, "<tool_call>\n<function=>\n</function>\n</tool_call>"),
    raw(FUNCTION_TAGS, f"<tool_call>{JSON}</tool_call>"),
    (SEED_FUNCTION_TAGS, f"I look.\n{SEED}", ["I look.\n", CALL]),
    raw(SEED_FUNCTION_TAGS, SEED.replace("</function>\n", "")),
    (INVOKE_TAGS, f"<minimax:tool_call>\n{INVOKED}</minimax:tool_call>", [CALL]),
    (INVOKE_TAGS, f"So.<minimax:tool_call>{INVOKED * 2}</minimax:tool_call>", ["So.", CALL, CALL]),
    raw(INVOKE_TAGS, f"<minimax:tool_call>{INVOKED}<invoke></minimax:tool_call>"),
    (SEPARATED_JSON, f"{BEGIN}{SEPARATED}{END}", [CALL]),
    (SEPARATED_JSON, f"So. {BEGIN}{SEPARATED}{SEPARATED}{END}", ["So. ", CALL, CALL]),
    (SEPARATED_JSON, f"{BEGIN}{SEPARATED.removesuffix('<｜tool▁call▁end｜>')}", [CALL]),
    (
        SEPARATED_JSON,
        f"{BEGIN}<｜tool▁call▁begin｜>weather<｜tool▁sep｜>[1]<｜tool▁call▁end｜>{END}",
        ["<｜tool▁call▁begin｜>weather<｜tool▁sep｜>[1]<｜tool▁call▁end｜>"],
    ),
    (FENCED_JSON, f"{BEGIN}{FENCED}\n{FENCED}{END}", [CALL, "\n", CALL]),
    (FENCED_JSON, f"{BEGIN}{FENCED.replace('```<', '<')}", [FENCED.replace("```<", "<")]),
    (NUMBERED_SECTION_JSON, f"So. {NUMBERED}", ["So. ", CALL, CALL]),
    (NUMBERED_SECTION_JSON, NUMBERED.partition("<|tool_call_end|>")[0], [CALL]),
    raw(NUMBERED_SECTION_JSON, "functions.weather:0 {}"),
    (TAGGED_JSON, f"<think></think>\n\n{TAGGED_CALL}", [Thought(text=""), "\n\n", CALL]),
    # Within thoughts, calls count where nothing else follows them.
    (TAGGED_JSON, f"<think>hm {TAGGED_CALL}", [Thought(text="hm "), CALL]),
    (TAGGED_JSON, f"<think>hm {TAGGED_CALL}\n</think>\n\n", [Thought(text="hm "), CALL]),
    (SEPARATED_JSON, f"<think>hm{BEGIN}{SEPARATED * 2}{END}", [Thought(text="hm"), CALL, CALL]),
    (FUNCTION_TAGS, f"<think>hm\n{TAGGED}\n", [Thought(text="hm\n"), CALL]),
    (
        TAGGED_JSON,
        f"<think>as {TAGGED_CALL}</think>\n\nNo.",
        [Thought(text=f"as {TAGGED_CALL}"), "\n\nNo."],
    ),
    (
        TAGGED_JSON,
        f"<think>as {TAGGED_CALL}</think>{TAGGED_CALL}",
        [Thought(text=f"as {TAGGED_CALL}"), CALL],
    ),
    (TAGGED_JSON, f"<think>as {TAGGED_CALL} or", [Thought(text=f"as {TAGGED_CALL} or")]),
    (TAGGED_JSON, "<think>a <tool_call></think>so", [Thought(text="a <tool_call>"), "so"]),
    (TAGGED_JSON, "<think>a <tool_call> {", [Thought(text="a <tool_call> {")]),
    (None, f"<tool_call>{JSON}</tool_call>", [f"<tool_call>{JSON}</tool_call>"]),
    (None, "<think>why</think>because", [Thought(text="why"), "because"]),
    (None, "<think>why", [Thought(text="why")]),
    (None, "<thin", ["<thin"]),
    (None, "so <think>why</think>", ["so <think>why</think>"]),
]


def read(
    form: CallFormat | None,
    pieces: Sequence[str],
    channels: Channels | None = TAGGED_THOUGHTS,
    opened: str | None = None,
    in_pieces: bool = False,
) -> list[AnswerPart]:
    reader = AnswerReader(form, channels, opened=opened, parameters=PARAMETERS, in_pieces=in_pieces)
    found: list[AnswerPart] = []
    for piece in pieces:
        found += reader.push(piece)
    return _joined([*found, *reader.flush()])


@pytest.mark.parametrize(("form", "text", "parts"), ANSWERS)
def test_an_answer_cut_anywhere_has_the_same_parts(
    form: CallFormat | None, text: str, parts: list[AnswerPart]
) -> None:
    assert read(form, [text]) == parts
    assert read(form, list(text)) == parts
    for at in range(min(len(text), 400)):
        assert read(form, [text[:at], text[at:]]) == parts


CODE = 'if a < b:\n\t"</tool_call>" </function> {[<|call|> \\" '
CODED = {"city": CODE, "n": [{"x": CODE}]}
LOOSE = json.dumps(CODED).replace("\\n", "\n").replace("\\t", "\t")
"""As models write JSON: with line breaks as they are."""
CODE_TAGGED = TAGGED.replace(ARGUMENTS["city"], CODE)  # type: ignore[arg-type]
CODE_KEYED = KEYED.replace(ARGUMENTS["city"], CODE)  # type: ignore[arg-type]
MARKS_WITHIN = [
    (TAGGED_JSON, f'<tool_call>\n{{"name": "weather", "arguments": {LOOSE}}}\n</tool_call>'),
    (LISTED_JSON, f'[TOOL_CALLS][{{"name": "weather", "arguments": {LOOSE}}}]'),
    (NUMBERED_JSON, f"[TOOL_CALLS]weather[CALL_ID]a1B2c3D4e[ARGS]{LOOSE}"),
    (MARKED_JSON, f"[TOOL_CALLS]weather[ARGS]{LOOSE}"),
    (
        ACTIONS_JSON,
        '<|START_ACTION|>[\n{"tool_call_id": "0", "tool_name": "weather", "parameters": '
        f"{LOOSE}}}\n]<|END_ACTION|>",
    ),
    (FUNCTION_JSON, f"<function=weather>{LOOSE}</function>"),
    (FUNCTION_CALL_JSON, f'<|function_call|>{{"name": "weather", "arguments": {LOOSE}}}'),
    (
        FUNCTION_ROLE_JSON,
        f'function call<|role_sep|>\n{{"name": "weather", "arguments": {LOOSE}}}',
    ),
    (FENCED_JSON, BEGIN + FENCED.replace(JSON_ARGUMENTS, LOOSE) + END),
    (SEPARATED_JSON, BEGIN + SEPARATED.replace(JSON_ARGUMENTS, LOOSE) + END),
    (BARE_JSON, f'{{"name": "weather", "parameters": {LOOSE}}}'),
    (
        CHANNEL_JSON,
        f"<|start|>assistant<|channel|>commentary to=functions.weather<|message|>{LOOSE}<|call|>",
    ),
]


@pytest.mark.parametrize(("form", "text"), MARKS_WITHIN)
@pytest.mark.parametrize("in_pieces", [False, True])
def test_no_mark_counts_within_a_string_of_a_call(
    form: CallFormat, text: str, in_pieces: bool
) -> None:
    channels = MESSAGES if form.in_channel else TAGGED_THOUGHTS
    for pieces in ([text], list(text)):
        parts = whole_calls(read(form, pieces, channels, in_pieces=in_pieces))
        (call,) = parts
        assert isinstance(call, Call), parts
        assert json.loads(call.arguments) == CODED


@pytest.mark.parametrize(
    ("form", "text"), [(FUNCTION_TAGS, CODE_TAGGED), (KEYS_AND_VALUES, CODE_KEYED)]
)
def test_what_closes_a_call_may_stand_in_an_argument(form: CallFormat, text: str) -> None:
    for pieces in ([text], list(text)):
        (call,) = read(form, pieces)
        assert isinstance(call, Call)
        assert json.loads(call.arguments)["city"] == CODE


def whole_calls(parts: Sequence[AnswerPart]) -> list[AnswerPart]:
    """The same with the pieces of calls put together."""
    found: list[AnswerPart] = []
    for part in parts:
        if isinstance(part, CallBegun):
            found.append(Call(name=part.name, arguments=""))
        elif isinstance(part, CallGrows):
            call = found.pop()
            assert isinstance(call, Call)
            found.append(Call(name=call.name, arguments=call.arguments + part.arguments))
        else:
            found.append(part)
    return found


def told_of(parts: Sequence[AnswerPart]) -> list[object]:
    """Parts with the arguments of calls as values."""
    return [
        (part.name, json.loads(part.arguments)) if isinstance(part, Call) else part
        for part in parts
    ]


@pytest.mark.parametrize(("form", "text", "parts"), ANSWERS)
def test_calls_in_pieces_are_the_whole_calls(
    form: CallFormat | None, text: str, parts: list[AnswerPart]
) -> None:
    if not any(isinstance(part, Call) for part in parts):
        return  # what is broken stays as it was told
    for pieces in ([text], list(text), [text[at : at + 7] for at in range(0, len(text), 7)]):
        assert told_of(whole_calls(read(form, pieces, in_pieces=True))) == told_of(parts)


@pytest.mark.parametrize(
    ("form", "text"),
    [
        *((form, text) for form, text in MARKS_WITHIN),
        (FUNCTION_TAGS, TAGGED),
        (KEYS_AND_VALUES, KEYED),
        (SEED_FUNCTION_TAGS, SEED),
        (INVOKE_TAGS, f"<minimax:tool_call>\n{INVOKED}</minimax:tool_call>"),
    ],
)
def test_a_call_is_told_of_before_it_is_whole(form: CallFormat, text: str) -> None:
    channels = MESSAGES if form.in_channel else TAGGED_THOUGHTS
    reader = AnswerReader(form, channels, parameters=PARAMETERS, in_pieces=True)
    found = [part for char in text[: 3 * len(text) // 4] for part in reader.push(char)]
    assert found[0] == CallBegun(name="weather")
    assert len([part for part in found if isinstance(part, CallGrows)]) >= 5
    assert whole_calls(found)[0].arguments.startswith('{"city": "')  # type: ignore[union-attr]


@pytest.mark.property
@pytest.mark.parametrize(("form", "text", "parts"), ANSWERS)
@given(data=st.data())
@examples(10)
def test_any_cuts_of_an_answer_give_the_same_parts(
    form: CallFormat | None, text: str, parts: list[AnswerPart], data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(text) - 1)))))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(form, pieces) == parts


@pytest.mark.property
@given(
    form=st.sampled_from([*CALL_FORMATS, None]),
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
                "weather",
                "<arg_key>",
                "</arg_key><arg_value>",
                "</arg_value>",
                "<function=weather>",
                "</function>",
                FENCED,
                SEPARATED,
                BEGIN,
                END,
            ]
        ),
        max_size=8,
    ),
)
@examples(100)
def test_no_cut_changes_what_strange_answers_are(
    form: CallFormat | None, pieces: list[str]
) -> None:
    assert read(form, pieces) == read(form, list("".join(pieces))) == read(form, ["".join(pieces)])


def test_text_leaves_as_soon_as_it_cannot_become_a_mark() -> None:
    reader = AnswerReader(TAGGED_JSON, None)
    assert reader.push("a <to") == ["a "]
    assert reader.push("y") == ["<toy"]


@pytest.mark.parametrize("form", [None, TAGGED_JSON, BARE_JSON])
def test_thoughts_that_the_prompt_began_may_begin_again(form: CallFormat | None) -> None:
    thought = Thought(text="hm {a}")
    for text, parts in [
        ("hm {a}</think>so", [thought, "so"]),
        ("\n<think>hm {a}</think>so", [thought, "so"]),
        ("{a}</think>so", [Thought(text="{a}"), "so"]),
        ("</think><think>so", [Thought(text=""), "<think>so"]),
        ("</think>so", [Thought(text=""), "so"]),
        (" <thin", [Thought(text=" <thin")]),
    ]:
        assert read(form, [text], opened="") == read(form, list(text), opened="") == parts


def test_what_is_too_long_for_a_call_stays_thoughts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(HELD_MAX, _Place.ASIDE, 30)
    text = "<think>a <tool_call>" + "a" * 40 + "</think>so"
    for pieces in ([text], list(text)):
        thought = text.removeprefix("<think>").removesuffix("</think>so")
        assert read(TAGGED_JSON, pieces) == [Thought(text=thought), "so"]


@pytest.mark.parametrize("form", [TAGGED_JSON, KEYS_AND_VALUES, BARE_JSON, LISTED_JSON])
@pytest.mark.parametrize("size", [29, 30, 31, 80])
def test_a_call_that_never_ends_is_text(
    form: CallFormat, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(HELD_MAX, _Place.CALL, 30)
    text = (form.opens or "{") + "a" * size
    parts = read(form, [text])
    assert parts == read(form, list(text)) == [text]
    reader = AnswerReader(form, None)
    held = "".join(str(part) for each in text for part in reader.push(each))
    assert (held == "") is (len(text) <= 30)


FLOODS = ["<tool_call>", "<tool_call>a</tool_call>", "<|start|>a<|message|>", "<|end|>", "<", " "]


@pytest.mark.parametrize("form", CALL_FORMATS)
@pytest.mark.parametrize("piece", FLOODS)
def test_each_character_is_looked_at_a_bounded_number_of_times(
    form: CallFormat, piece: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = 0
    first = _Marks.first

    def counted(marks: _Marks, text: str, at: int) -> tuple[int, str]:
        nonlocal looked
        end, mark = first(marks, text, at)
        looked += (end + len(mark) if mark else len(text)) - at
        return end, mark

    monkeypatch.setattr(_Marks, "first", counted)
    channels = MESSAGES if form.in_channel else TAGGED_THOUGHTS
    for before in (form.opens, "<think>"):
        text = (before + piece * 2500)[:2500]
        for pieces in (list(text), [text]):
            looked = 0
            read(form, pieces, channels)
            assert looked <= 40 * len(text)


LONG = 1 << 16
"""Characters that are read in milliseconds, and in minutes where each of them is tried with all
that follow."""
BEGUN_CALLS = ["", "weather", "{", '{"name"', "weather[ARGS]", "[", *(
    f"{name}{argument}"
    for name in ("weather", "<function=weather>", '<invoke name="weather">', "<function=")
    for argument in ("<arg_key>", "<parameter=", '<parameter name="')
)]  # fmt: skip


@pytest.mark.parametrize("form", CALL_FORMATS, ids=lambda form: form.title)
def test_a_long_stretch_of_blanks_is_passed_once(form: CallFormat) -> None:
    channels = MESSAGES if form.in_channel else None
    for begun in BEGUN_CALLS:
        text = f"{form.opens or '{'}{begun}{' ' * LONG}x{form.closes}"
        for in_pieces in (False, True):
            read(form, [text], channels, in_pieces=in_pieces)


@pytest.mark.parametrize("form", [LISTED_JSON, TAGGED_JSON, FUNCTION_JSON])
def test_what_a_call_grows_by_is_put_together_once(
    form: CallFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = 0

    class Counted(CallGrows):
        def __init__(self, *, arguments: str) -> None:
            nonlocal copied
            copied += len(arguments)
            super().__init__(arguments=arguments)

    monkeypatch.setattr(call_pieces, "CallGrows", Counted)
    deep = '{"x": ' + "[" * 1000 + "]" * 1000 + "}"
    call = (
        f"weather>{deep}"
        if form is FUNCTION_JSON
        else f'{{"name": "weather", "arguments": {deep}}}'
    )
    read(form, [form.opens + call + form.closes], in_pieces=True)
    assert len(deep) <= copied <= 4 * len(deep)
