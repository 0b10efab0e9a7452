"""How models write calls of functions, as one table. Pure.

Which entry is a model's is found in its chat template, never by its name.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import cache

PYTHON_TAG = "<|python_tag|>"
_TELLS = re.compile(r"\btools\b")


class Hole(Enum):
    """A place in a form that differs from call to call."""

    JSON = "{json}"
    """An object with the name and the arguments, or several of them."""
    NAME = "{name}"
    ID = "{id}"
    """What tells calls of one answer apart; answers to programs have ids of their own."""
    ARGUMENTS = "{arguments}"
    """The arguments as a JSON object."""
    EACH = "{each}"
    """Every argument, one behind the other, in the form of an argument."""
    KEY = "{key}"
    VALUE = "{value}"
    """A string as it is, anything else as JSON."""
    BREAK = "\n"
    """White space that may be there; beside a value one line break, which is no part of it."""


MarkOrHole = str | Hole
"""A mark, or a hole between marks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFormat:
    """How a model writes its calls. What forms have between marks is a :class:`Hole`."""

    title: str
    known_by: tuple[tuple[str, ...], ...]
    """What a chat template has that writes calls in this way: all of one of these."""
    unless: tuple[str, ...] = ()
    """What such a template has not."""
    begins: str = ""
    """Mark before the first call."""
    opens: str = ""
    """Mark before each call; empty: the answer begins with its calls."""
    form: str = "{json}"
    """A call between its marks."""
    argument: str = ""
    """An argument, for ``{each}``."""
    closes: str = ""
    """Mark behind each call; empty: the rest of the answer is calls."""
    ends: str = ""
    """Mark behind the last call."""
    id_form: str = "[0-9a-zA-Z]{9}"
    """What an id may be, as a regular expression."""
    is_list: bool = False
    """Whether ``{json}`` is a list of calls between the marks."""
    id_name: str = ""
    """What an id is called in ``{json}``, in front of the others; empty: it has none."""
    function_name: str = "name"
    """What the function is called in ``{json}``."""
    arguments_name: str = "arguments"
    """What the arguments are called in ``{json}``."""
    also: tuple[str, ...] = ()
    """Marks that may stand within calls, or before them."""
    in_channel: bool = False
    """Whether each call is a message of its own (:mod:`client.gateway.structured.channels`), and
    the answer ends with it."""

    @property
    def marks(self) -> frozenset[str]:
        """What stands between the holes of calls, and beside calls. A tokenizer may have tokens
        for it, or for parts of it, and call them special; they stay in an answer's text."""
        steps = (*steps_of(self.form), *steps_of(self.argument))
        marks = (self.begins, self.opens, self.closes, self.ends, *self.also, *steps)
        return frozenset(mark for mark in marks if isinstance(mark, str) and mark)

    @property
    def is_json(self) -> bool:
        """Whether arguments are JSON, within which no mark counts."""
        return Hole.EACH not in steps_of(self.form)


NUMBERED_JSON = CallFormat(
    title="a name, an id, and JSON behind marks",
    known_by=(("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),),
    opens="[TOOL_CALLS]",
    form="{name}[CALL_ID]{id}[ARGS]{arguments}",
)
MARKED_JSON = CallFormat(
    title="a name and JSON, both behind marks",
    known_by=(("[TOOL_CALLS]", "[ARGS]"),),
    opens="[TOOL_CALLS]",
    form="{name}[ARGS]{arguments}",
    also=("[CALL_ID]",),
)
LISTED_JSON = CallFormat(
    title="a JSON list, or names with JSON behind each",
    known_by=(("[TOOL_CALLS]",),),
    opens="[TOOL_CALLS]",
    is_list=True,
    also=("[ARGS]", "[CALL_ID]"),
)
ACTIONS_JSON = CallFormat(
    title="a JSON list of actions",
    known_by=(("<|START_ACTION|>", "tool_name"),),
    opens="<|START_ACTION|>",
    closes="<|END_ACTION|>",
    is_list=True,
    id_name="tool_call_id",
    function_name="tool_name",
    arguments_name="parameters",
)
FUNCTION_CALL_JSON = CallFormat(
    title="JSON behind the mark of a call",
    known_by=(("<|function_call|>",),),
    opens="<|function_call|>",
)
FUNCTION_ROLE_JSON = CallFormat(
    title="JSON in a message of the function's role",
    known_by=(("function call", "<|role_sep|>"),),
    opens="function call<|role_sep|>\n",
)
KEYS_AND_VALUES = CallFormat(
    title="a name, and keys and values in tags",
    known_by=(("<tool_call>", "<arg_key>", "<arg_value>"),),
    opens="<tool_call>",
    form="{name}{each}\n",
    argument="\n<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>",
    closes="</tool_call>",
)
FUNCTION_TAGS = CallFormat(
    title="a function and its parameters in tags",
    known_by=(("<tool_call>", "<function=", "<parameter="),),
    opens="<tool_call>",
    form="\n<function={name}>{each}\n</function>\n",
    argument="\n<parameter={key}>\n{value}\n</parameter>",
    closes="</tool_call>",
)
SEED_FUNCTION_TAGS = CallFormat(
    title="a function and its parameters in tags of their own name",
    known_by=(("<seed:tool_call>", "<function=", "<parameter="),),
    opens="<seed:tool_call>",
    form="\n<function={name}>{each}\n</function>\n",
    argument="\n<parameter={key}>{value}</parameter>",
    closes="</seed:tool_call>",
)
INVOKE_TAGS = CallFormat(
    title="functions and parameters named by attributes",
    known_by=(("<minimax:tool_call>", "<invoke name=", "<parameter name="),),
    opens="<minimax:tool_call>",
    form='\n<invoke name="{name}">{each}\n</invoke>\n',
    argument='\n<parameter name="{key}">{value}</parameter>',
    closes="</minimax:tool_call>",
)
TAGGED_JSON = CallFormat(
    title="JSON in tags",
    known_by=(("<tool_call>",),),
    unless=("<function=", "<arg_key>"),
    opens="<tool_call>",
    form="\n{json}\n",
    closes="</tool_call>",
)
FENCED_JSON = CallFormat(
    title="a type, a name, and JSON in a fence",
    known_by=(("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "```json"),),
    begins="<｜tool▁calls▁begin｜>",
    opens="<｜tool▁call▁begin｜>",
    form="function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```",
    closes="<｜tool▁call▁end｜>",
    ends="<｜tool▁calls▁end｜>",
)
SEPARATED_JSON = CallFormat(
    title="a name, and JSON behind a mark",
    known_by=(("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),),
    begins="<｜tool▁calls▁begin｜>",
    opens="<｜tool▁call▁begin｜>",
    form="{name}<｜tool▁sep｜>{arguments}",
    closes="<｜tool▁call▁end｜>",
    ends="<｜tool▁calls▁end｜>",
)
NUMBERED_SECTION_JSON = CallFormat(
    title="a name and a number, and JSON behind a mark, in a section of calls",
    known_by=(("<|tool_call_begin|>", "<|tool_call_argument_begin|>"),),
    begins="<|tool_calls_section_begin|>",
    opens="<|tool_call_begin|>",
    form="functions.{name}:{id}<|tool_call_argument_begin|>{arguments}",
    closes="<|tool_call_end|>",
    ends="<|tool_calls_section_end|>",
    id_form="[0-9]{1,3}",
)
CHANNEL_JSON = CallFormat(
    title="JSON in a message to the function",
    known_by=(("<|channel|>", "<|message|>", "functions."),),
    opens="<|channel|>",
    form="commentary to=functions.{name} <|constrain|>json<|message|>{arguments}",
    also=("<|constrain|>", "<|message|>"),
    in_channel=True,
)
FUNCTION_JSON = CallFormat(
    title="JSON in the tag of a function",
    known_by=(("<function=", "</function>"),),
    unless=("<tool_call>", "<parameter=", "<seed:tool_call>"),
    opens="<function=",
    form="{name}>{arguments}",
    closes="</function>",
)
BARE_JSON = CallFormat(
    title="bare JSON",
    known_by=((PYTHON_TAG,), ('"parameters"', "tools")),
    unless=("<tool_call>",),
    arguments_name="parameters",
    also=(PYTHON_TAG,),
)
CALL_FORMATS = tuple(each for each in tuple(globals().values()) if isinstance(each, CallFormat))
"""All of the above, in that order: of several that fit a template, the first is the model's."""


def call_format(
    template: str, written: str = "", reads: Callable[[CallFormat], bool] | None = None
) -> CallFormat | None:
    """How the model of this chat template writes calls.

    ``written`` is what the template writes for an answer that is a call, if that is known, and
    ``reads`` says whether a form reads the call in it; None: it shows none. None where the way is
    not known, and where the template does not tell its model of functions.
    """
    if not _TELLS.search(template):
        return None

    def has(texts: tuple[str, ...]) -> bool:
        return all(text in template for text in texts)

    known = (each for each in CALL_FORMATS if any(map(has, each.known_by)))
    fits = (each for each in known if not any(text in template for text in each.unless))
    form = next((each for each in fits if reads is None or reads(each)), None)
    # Nothing marks bare JSON, so that many a template looks as if it wrote that.
    is_bare = not written.strip() or written.lstrip().startswith(("{", PYTHON_TAG))
    return None if form is BARE_JSON and not is_bare else form


@cache
def steps_of(form: str) -> tuple[MarkOrHole, ...]:
    """The marks and holes of a form, in their order."""
    holes = {hole.value: hole for hole in Hole}
    parts = re.split("(" + "|".join(map(re.escape, holes)) + ")", form)
    return tuple(holes.get(part, part) for part in parts if part)
