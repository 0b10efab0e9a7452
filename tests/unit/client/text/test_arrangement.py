"""What a conversation says stands in the prompt, whatever the template has places for."""

import itertools
from typing import Any

import pytest

from client.text.arrangement import Arguments, LeftOut, _one_call_each, arranged
from client.text.chat_template import ChatTemplate, TakesTooLong
from dht.errors import UserError
from tests.templates import GPT_OSS, HERMES, KIMI_K2, MISTRAL, QWEN3, TEMPLATES

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def call(name: str, said: object) -> dict[str, Any]:
    function = {"name": name, "arguments": said}
    return {"id": f"call_{name}", "type": "function", "function": function}


def asks(*calls: Any, said: str = "") -> dict[str, Any]:
    return {"role": "assistant", "content": said, "tool_calls": list(calls)}


def result(name: str, said: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call_{name}", "content": said}


def says(role: str, said: str) -> dict[str, Any]:
    return {"role": role, "content": said}


USER, ANSWER = says("user", "q-first"), says("assistant", "a-first")
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "plain": [USER, ANSWER, says("user", "q-second")],
    "a developer": [says("developer", "d-one"), USER],
    "two systems": [says("system", "s-one"), says("developer", "d-two"), USER],
    "a later system": [says("system", "s-one"), USER, ANSWER, says("system", "s-two"), USER],
    "a system at the end": [USER, says("system", "s-two")],
    "two users": [USER, says("user", "q-second"), ANSWER, says("user", "q-third")],
    "two answers": [USER, ANSWER, says("assistant", "a-second"), says("user", "q-second")],
    "an answer first": [says("assistant", "a-first"), USER],
    "a call": [USER, asks(call("look", Arguments(at="x-one"))), result("look", "r-one")],
    "a call without arguments": [USER, asks(call("look", Arguments())), result("look", "r-one")],
    "what is said before a call": [
        USER, asks(call("look", Arguments(at="x-one")), said="i-look"), result("look", "r-one"),
    ],
    "two calls at once": [
        USER,
        asks(call("look", Arguments(at="x-one")), call("see", Arguments(at="x-two")), said="i-lo"),
        result("look", "r-one"), result("see", "r-two"),
    ],
    "a question behind a result": [
        USER, asks(call("look", Arguments(at="x-one"))), result("look", "r-one"),
        says("user", "q-second"), says("user", "q-third"),
    ],
    "calls that went wrong": [
        USER, asks(call("look", '{"at": "x-one'), said="i-look"), result("look", "r-one"),
        says("assistant", "a-second"), says("user", "q-second"),
    ],
    "a long one": [
        says("system", "s-one"), says("developer", "d-two"), USER,
        asks(call("look", Arguments(at="x-one")), call("see", Arguments()), said="i-look"),
        result("look", "r-one"), result("see", "r-two"), says("assistant", "a-second"),
        says("user", "q-second"), says("system", "s-three"), says("user", "q-third"),
        asks(call("look", Arguments(at="x-three"))), result("look", "r-three"),
    ],
}  # fmt: skip


def words_of(messages: list[dict[str, Any]]) -> list[str]:
    found = []
    for message in messages:
        found.append(message["content"])
        for each in message.get("tool_calls", ()):
            arguments = each["function"]["arguments"]
            found += arguments.values() if isinstance(arguments, dict) else ["x-one"]
            found.append(each["function"]["name"])
    return [word for word in found if word]


@pytest.mark.parametrize("title", CONVERSATIONS)
@pytest.mark.parametrize("family", TEMPLATES)
def test_what_is_said_stands_in_the_prompt(family: str, title: str) -> None:
    messages, template = CONVERSATIONS[title], ChatTemplate(TEMPLATES[family], {})
    for tools in (None, [TOOL]):
        prompt = template.render(arranged(template, messages, tools=tools), tools=tools)
        assert [word for word in words_of(messages) if word not in prompt] == []


@pytest.mark.parametrize("family", TEMPLATES)
def test_what_a_template_takes_stays_as_it_is(family: str) -> None:
    messages = [USER, ANSWER, says("user", "q-second")]
    assert arranged(ChatTemplate(TEMPLATES[family], {}), messages) == messages


def test_rewrites_that_a_template_does_not_need_are_left_out() -> None:
    messages = [*CONVERSATIONS["a later system"], *CONVERSATIONS["a call"]]
    assert arranged(ChatTemplate(HERMES, {}), messages) == messages
    found = arranged(ChatTemplate(MISTRAL, {}), CONVERSATIONS["two calls at once"])
    assert [len(each["tool_calls"]) for each in found if each.get("tool_calls")] == [2]


def test_a_developer_is_a_system_but_for_families_that_know_it() -> None:
    developer = [says("developer", "d-one"), USER]
    for source, role in ((QWEN3, "system"), (HERMES, "system"), (GPT_OSS, "developer")):
        assert arranged(ChatTemplate(source, {}), developer)[0]["role"] == role


def test_thoughts_between_calls_reach_a_template_by_its_own_name() -> None:
    thinks = {**asks(call("look", Arguments(at="x-one"))), "reasoning_content": "t-one"}
    template = ChatTemplate(GPT_OSS, {})
    for said in ("", "i-look"):
        messages = [USER, {**thinks, "content": said}, result("look", "r-one")]
        prompt = template.render(arranged(template, messages))
        assert "t-one" in prompt
        assert said in prompt


def test_a_call_and_its_result_stay_together_where_a_template_shows_ids_alone() -> None:
    template = ChatTemplate(KIMI_K2, {})
    once = [asks(call("look", Arguments(at="x-one"))), result("look", "r-one")]
    prompt = template.render(arranged(template, [USER, *once, *once]))
    assert prompt.count("functions.look:0") == prompt.count("functions.look:1") == 2


def test_a_result_has_the_name_of_the_last_call_of_its_id() -> None:
    template = ChatTemplate(
        "{% for m in messages %}{% if m.role == 'tool' and not m.name %}"
        "{{ raise_exception('whose result?') }}{% endif %}{{ m.role }} {{ m.name }} {{ m.content }}"
        "{% for call in m.tool_calls or [] %}{{ call.function.name }}{% endfor %}; {% endfor %}",
        {},
    )
    messages = [USER]
    for name in ("look", "see"):
        messages.append(asks({**call(name, Arguments()), "id": ""}))
        messages.append({**result(name, f"r-{name}"), "tool_call_id": ""})
    prompt = template.render(arranged(template, messages))
    assert "tool look r-look;" in prompt
    assert "tool see r-see;" in prompt


def test_what_has_no_place_is_named() -> None:
    with pytest.raises(LeftOut, match=r"messages\[1\]: this model's chat template leaves its text"):
        arranged(ChatTemplate(QWEN3, {}), [USER, says("critic", "c-one"), USER])
    refuses = ChatTemplate("{{ raise_exception('never') }}", {})
    with pytest.raises(UserError, match="never"):
        arranged(refuses, [USER])


def test_every_short_conversation_of_plain_turns_has_a_place() -> None:
    roles = ("system", "developer", "user", "assistant")
    for size, source in itertools.product((1, 2, 3, 4), (MISTRAL, QWEN3, TEMPLATES["Gemma 2"])):
        template = ChatTemplate(source, {})
        for chosen in itertools.product(roles, repeat=size):
            if {"user", "system", "developer"}.isdisjoint(chosen):
                continue
            messages = [says(role, f"w{at}w") for at, role in enumerate(chosen)]
            prompt = template.render(arranged(template, messages))
            assert all(f"w{at}w" in prompt for at in range(size)), chosen


class Searched(str):
    """A text that counts how often something is looked for in it."""

    looks = 0

    def __contains__(self, word: object) -> bool:
        type(self).looks += 1
        return super().__contains__(word)  # type: ignore[operator]


def test_a_prompt_is_searched_for_all_words_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of a thousand calls is two words, and the prompt is as long as they are."""
    template = ChatTemplate(HERMES, {})
    render = template.render
    monkeypatch.setattr(template, "render", lambda *a, **k: Searched(render(*a, **k)))
    many = [asks(*(call("look", Arguments(at="x-one")) for _ in range(100))) for _ in range(10)]
    assert arranged(template, [USER, *many]) == [USER, *many]
    assert Searched.looks == 0


class Compared(dict[str, Any]):
    """A message that counts how often it is compared."""

    looks = 0

    def __eq__(self, other: object) -> bool:
        type(self).looks += 1
        return super().__eq__(other)

    __hash__ = None  # type: ignore[assignment]


def test_nothing_is_rewritten_for_a_template_that_takes_too_long() -> None:
    class Counted(ChatTemplate):
        rendered = 0

        def render(self, *arguments: Any, **named: Any) -> str:
            Counted.rendered += 1
            return super().render(*arguments, **named)

    with pytest.raises(TakesTooLong):
        arranged(Counted(MISTRAL, {}), CONVERSATIONS["two calls at once"], late=lambda: True)
    assert Counted.rendered == 1


def test_results_find_their_calls_without_looking_at_all_pairs() -> None:
    results = [Compared(result("look", f"r-{at}")) for at in range(100)]
    alone = [Compared(result("other", "r-other"))]
    found = _one_call_each([asks(call("see", ""), call("look", "")), *results, *alone])
    assert [each["role"] for each in found[:2]] == ["assistant", "assistant"]
    assert [each["content"] for each in found[2:]] == [*(f"r-{at}" for at in range(100)), "r-other"]
    assert Compared.looks == 0
