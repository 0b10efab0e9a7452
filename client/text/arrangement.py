"""Arranges a conversation for a chat template, so that nothing that was said is lost. Pure.

Templates differ in what they take: some refuse a second system message or two user messages in a
row, some show one call of several, some leave out what they have no place for. A skeleton of the
conversation, with a word of its own in the place of each text, is rendered and searched for these
words. Where the template refuses it or one is missing, the conversation is rewritten, by as few
rewrites as will do.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import sha256
from itertools import count
from typing import Any

from client.text.chat_template import ChatTemplate, TakesTooLong
from dht.errors import UserError

Message = dict[str, Any]
Rewrite = Callable[[Sequence[Message]], list[Message]]

DEVELOPER = "developer"
BETWEEN = "\n\n"
"""Between texts that become one."""
CALLS_NAME = "the name of a call"
CALL_ID_CHARS = 9
"""Fixed by Mistral's templates: some take ids of calls of this length alone."""
_WORD = re.compile("zq[0-9]+qz")
"""The words of a skeleton."""
THOUGHT_NAMES = ("reasoning_content", "reasoning", "thinking")
"""What templates call the thoughts of an assistant's message."""


class Arguments(dict[str, Any]):
    """Arguments of a call as templates take them: an object, for most of them, and its JSON text
    for those that join it to a text."""

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    def __add__(self, text: str) -> str:
        return str(self) + text

    def __radd__(self, text: str) -> str:
        return text + str(self)


class LeftOut(UserError):
    """A template has no place for the message ``at``, counted from 0."""

    def __init__(self, at: int, what: str) -> None:
        super().__init__(f"messages[{at}]: this model's chat template leaves {what} out")
        self.at = at


def arranged(
    template: ChatTemplate,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    options: Mapping[str, Any] | None = None,
    add_generation_prompt: bool = True,
    late: Callable[[], bool] = lambda: False,
) -> list[Message]:
    """The conversation, rewritten as far as the template needs it; the arguments are those of
    :meth:`ChatTemplate.render`. The last message stays last.

    Raises UserError with the template's reason, or LeftOut for what it has no place for.
    """
    given = [_with_thoughts(message, template.source) for message in messages]
    always: list[Rewrite] = [_first_systems_joined, _results_in_order]
    if DEVELOPER not in template.source:
        # One that writes any role would write this, too, which its model has never seen.
        always.insert(0, _developers_as_systems)
    skeleton, words = _skeleton(given)
    stubs = None if tools is None else [_stub(tool) for tool in tools]

    def fault(rewrites: Sequence[Rewrite], *but: str) -> UserError | None:
        try:
            text = template.render(
                _rewritten(skeleton, rewrites),
                tools=stubs,
                options=options,
                add_generation_prompt=add_generation_prompt,
                late=late,
            )
        except TakesTooLong:
            raise
        except UserError as error:
            return error
        said = set(_WORD.findall(text))  # once: there are as many words as the text is long
        wanted = ((word, told) for word, told in words.items() if told[1] not in but)
        missing = next((told for word, told in wanted if word not in said), None)
        return None if missing is None else LeftOut(*missing)

    first = fault(always)
    if first is None:
        return _rewritten(given, always)
    chosen = [*always]
    for rewrite in REWRITES:
        if _rewritten(skeleton, [*chosen, rewrite]) == _rewritten(skeleton, chosen):
            continue
        chosen.append(rewrite)
        if fault(chosen) is None:
            break
    else:
        # A template that shows no call's name anywhere is what its model was trained with.
        if fault(always, CALLS_NAME) is not None:
            raise first
        return _rewritten(given, always)
    for at in reversed(range(len(always), len(chosen) - 1)):
        fewer = [*chosen[:at], *chosen[at + 1 :]]
        if fault(fewer) is None:
            chosen = fewer
    return _rewritten(given, chosen)


def _rewritten(messages: Sequence[Message], rewrites: Sequence[Rewrite]) -> list[Message]:
    found = list(messages)
    for rewrite in rewrites:
        found = rewrite(found)
    return found


def _with_thoughts(message: Message, source: str) -> Message:
    """The message, with its thoughts under all names that the template reads."""
    thoughts = message.get(THOUGHT_NAMES[0])
    if not thoughts:
        return message
    return {**message, **{name: thoughts for name in THOUGHT_NAMES[1:] if name in source}}


def _skeleton(messages: Sequence[Message]) -> tuple[list[Message], dict[str, tuple[int, str]]]:
    """The messages with a word in the place of each text, and where each word stands. Thoughts are
    not looked for: templates leave out those of earlier turns, as their models were trained."""
    words: dict[str, tuple[int, str]] = {}

    def word(at: int, what: str) -> str:
        found = f"zq{len(words)}qz"
        words[found] = (at, what)
        return found

    found: list[Message] = []
    for at, message in enumerate(messages):
        told = dict(message)
        if message.get("content"):
            told["content"] = word(at, "its text")
        if _is_named(message):
            told["name"] = word(at, "its name")
        if message.get("tool_calls"):
            told["tool_calls"] = [_call_of(call, at, word) for call in message["tool_calls"]]
        found.append(told)
    return found, words


def _call_of(call: Message, at: int, word: Callable[[int, str], str]) -> Message:
    name, arguments = word(at, CALLS_NAME), call["function"]["arguments"]
    if not arguments:
        arguments = Arguments()
    elif isinstance(arguments, str):
        arguments = word(at, "the arguments of a call")
    else:
        arguments = Arguments(dict.fromkeys(arguments, word(at, "the arguments of a call")))
    return {**call, "function": {"name": name, "arguments": arguments}}


def _stub(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool without its long texts."""
    parameters = {"type": "object", "properties": {}, "required": []}
    function = {"name": tool["function"]["name"], "description": "a", "parameters": parameters}
    return {**tool, "function": function}


def _developers_as_systems(messages: Sequence[Message]) -> list[Message]:
    return [{**each, "role": "system"} if each["role"] == DEVELOPER else each for each in messages]


def _first_systems_joined(messages: Sequence[Message]) -> list[Message]:
    count = next(
        (at for at, each in enumerate(messages) if each["role"] != "system"), len(messages)
    )
    return [*_joined(messages[:count]), *messages[count:]]


def _later_systems_as_users(messages: Sequence[Message]) -> list[Message]:
    return [
        {**each, "role": "user"} if at and each["role"] == "system" else each
        for at, each in enumerate(messages)
    ]


def _systems_as_users(messages: Sequence[Message]) -> list[Message]:
    return [{**each, "role": "user"} if each["role"] == "system" else each for each in messages]


def _is_named(message: Message) -> bool:
    """Whether a message says who of several speaks in it."""
    return bool(message["role"] != "tool" and message.get("name") and message.get("content"))


def _names_in_texts(messages: Sequence[Message]) -> list[Message]:
    return [_name_in_text(each) if _is_named(each) else each for each in messages]


def _name_in_text(message: Message) -> Message:
    unnamed = {name: value for name, value in message.items() if name != "name"}
    return {**unnamed, "content": f"{message['name']}: {message['content']}"}


def _results_named(messages: Sequence[Message]) -> list[Message]:
    """Results of calls with the functions' names, for templates that cannot do without. An id is
    that of the last call before: some services begin anew with each turn, or give none."""
    names: dict[object, str] = {}
    found: list[Message] = []
    for each in messages:
        names |= {call["id"]: call["function"]["name"] for call in each.get("tool_calls") or ()}
        own = each.get("tool_call_id")
        is_named = each["role"] == "tool" and own in names
        found.append({"name": names[own], **each} if is_named else each)
    return found


def _results_behind(messages: Sequence[Message], at: int) -> Sequence[Message]:
    """The results of calls that stand in a row from ``at`` on."""
    end = at
    while end < len(messages) and messages[end]["role"] == "tool":
        end += 1
    return messages[at:end]


def _results_in_order(messages: Sequence[Message]) -> list[Message]:
    """Results in the order of their calls, which is all that tells them apart where a template
    shows no ids."""
    found: list[Message] = []
    while len(found) < len(messages):
        found.append(messages[len(found)])
        order = {call["id"]: at for at, call in enumerate(found[-1].get("tool_calls") or ())}
        if order:
            results = _results_behind(messages, len(found))
            own = (order.get(each.get("tool_call_id"), len(order)) for each in results)
            found += [results[at] for _, at in sorted((place, at) for at, place in enumerate(own))]
    return found


def _texts_apart_from_calls(messages: Sequence[Message]) -> list[Message]:
    """What is said before a call as a message of its own."""
    found: list[Message] = []
    for each in messages:
        if each.get("tool_calls") and each["content"]:
            found.append({"role": each["role"], "content": each["content"]})
            found.append({**each, "content": ""})
        else:
            found.append(each)
    return found


def _one_call_each(messages: Sequence[Message]) -> list[Message]:
    """Each of several calls as a message of its own, followed by its result."""
    found: list[Message] = []
    at = 0
    while at < len(messages):
        each = messages[at]
        at += 1
        calls = each.get("tool_calls") or ()
        if len(calls) < 2:
            found.append(each)
            continue
        results = _results_behind(messages, at)
        at += len(results)
        of_calls: dict[object, list[Message]] = {call["id"]: [] for call in calls}
        others = [one for one in results if one.get("tool_call_id") not in of_calls]
        for result in results:
            of_calls.get(result.get("tool_call_id"), []).append(result)
        for call in calls:
            found.append({**each, "tool_calls": [call]})
            each = {"role": each["role"], "content": ""}
            found += of_calls.pop(call["id"], ())
        found += others
    return found


def _turns_joined(messages: Sequence[Message]) -> list[Message]:
    return list(_joined(messages))


def _joined(messages: Sequence[Message]) -> Iterator[Message]:
    """Messages in a row of one role as one; calls and their results stay apart."""
    last: Message | None = None
    for each in messages:
        if (
            last is not None
            and _is_plain(last)
            and _is_plain(each)
            and last["role"] == each["role"]
        ):
            same = last.get("name") == each.get("name")
            both = (last, each) if same else _names_in_texts((last, each))
            texts = filter(None, (one["content"] for one in both))
            last = {**both[0], **both[1], "content": BETWEEN.join(texts)}
            continue
        if last is not None:
            yield last
        last = each
    if last is not None:
        yield last


def _is_plain(message: Message) -> bool:
    return message["role"] != "tool" and not message.get("tool_calls")


def _turns_filled(messages: Sequence[Message]) -> list[Message]:
    """An empty turn of the other side where two of one side follow each other, calls between."""
    found: list[Message] = []
    next_role = "user"
    for each in messages:
        if each["role"] in ("user", "assistant") and not each.get("tool_calls"):
            if each["role"] != next_role:
                found.append({"role": next_role, "content": ""})
            next_role = "assistant" if each["role"] == "user" else "user"
        found.append(each)
    return found


def _short_ids(messages: Sequence[Message]) -> list[Message]:
    def short(given: object) -> str:
        return sha256(str(given).encode("utf-8", "surrogatepass")).hexdigest()[:CALL_ID_CHARS]

    def of(message: Message) -> Message:
        if message["role"] == "tool":
            return {**message, "tool_call_id": short(message.get("tool_call_id"))}
        if message.get("tool_calls"):
            calls = [{**call, "id": short(call["id"])} for call in message["tool_calls"]]
            return {**message, "tool_calls": calls}
        return message

    return [of(message) for message in messages]


def _ids_that_name(messages: Sequence[Message]) -> list[Message]:
    """Ids of calls with the functions' names in them, for templates that show ids alone."""
    named: dict[object, str] = {}
    found: list[Message] = []
    numbers = count()
    for each in messages:
        if each["role"] == "tool":
            own = each.get("tool_call_id")
            found.append({**each, "tool_call_id": named.get(own, own)})
            continue
        calls = each.get("tool_calls") or ()
        for call in calls:
            named[call["id"]] = f"functions.{call['function']['name']}:{next(numbers)}"
        shown = [{**call, "id": named[call["id"]]} for call in calls]
        found.append({**each, "tool_calls": shown} if calls else each)
    return found


def _arguments_as_objects(messages: Sequence[Message]) -> list[Message]:
    """Arguments that are no JSON object as one that holds their text."""

    def whole(call: Message) -> Message:
        arguments = call["function"]["arguments"]
        if isinstance(arguments, str):
            arguments = Arguments({"text": arguments})
        return {**call, "function": {**call["function"], "arguments": arguments}}

    return [
        {**each, "tool_calls": [whole(call) for call in each["tool_calls"]]}
        if each.get("tool_calls")
        else each
        for each in messages
    ]


def _texts_as_parts(messages: Sequence[Message]) -> list[Message]:
    """Texts as lists of one part, for templates that read nothing else."""
    return [
        {**each, "content": [{"type": "text", "text": each["content"]}]}
        if each.get("content")
        else each
        for each in messages
    ]


def _calls_as_texts(messages: Sequence[Message]) -> list[Message]:
    """Calls and their results as texts, for templates that know none."""

    def of(message: Message) -> Message:
        if message["role"] == "tool":
            return {"role": "user", "content": message["content"]}
        if message.get("tool_calls"):
            functions = [call["function"] for call in message["tool_calls"]]
            calls = [json.dumps(function, ensure_ascii=False) for function in functions]
            said = BETWEEN.join(filter(None, (message["content"], *calls)))
            return {"role": message["role"], "content": said}
        return message

    return [of(message) for message in messages]


REWRITES: tuple[Rewrite, ...] = (
    _developers_as_systems,
    _first_systems_joined,
    _later_systems_as_users,
    _turns_joined,
    _arguments_as_objects,
    _results_named,
    _ids_that_name,
    _short_ids,
    _one_call_each,
    _texts_apart_from_calls,
    _turns_filled,
    _systems_as_users,
    _turns_joined,
    _names_in_texts,
    _calls_as_texts,
    _turns_joined,
    _turns_filled,
    _texts_as_parts,
)
"""Each is tried in its turn, on top of those before it."""
