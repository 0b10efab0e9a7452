"""Tells a model of functions in words, where its chat template shows none. Pure."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from client.gateway.structured.call_formats import CallFormat, Hole, steps_of

Json = dict[str, Any]
IN_WORDS: Mapping[Hole, str] = {
    Hole.NAME: "NAME",
    Hole.ARGUMENTS: "ARGUMENTS",
    Hole.KEY: "ARGUMENT",
    Hole.VALUE: "VALUE",
    Hole.BREAK: "\n",
}


def with_functions(
    messages: Sequence[Json], form: CallFormat, functions: Sequence[Json]
) -> list[Json]:
    """The same messages with the functions at the end of the system message, or in one."""
    told = told_of(form, functions)
    first, rest = messages[0], list(messages[1:])
    if first["role"] == "system":
        return [{**first, "content": f"{first['content']}\n\n{told}"}, *rest]
    return [{"role": "system", "content": told}, *messages]


def told_of(form: CallFormat, functions: Sequence[Json]) -> str:
    """What ``functions``, in OpenAI's form, are, and how to call them."""
    listed = "\n".join(json.dumps(each["function"], ensure_ascii=False) for each in functions)
    return (
        "## Tools\n\nYou may call these functions. Their parameters are JSON schemas.\n\n"
        f"{listed}\n\nA call has exactly this form, with the function's name for NAME and a JSON"
        f" object for ARGUMENTS:\n\n{example_of(form)}"
    )


def example_of(form: CallFormat) -> str:
    """A call in words."""

    def written(text: str) -> str:
        return "".join(
            step if isinstance(step, str) else (words.get(step, "")) for step in steps_of(text)
        )

    words = dict(IN_WORDS)
    words[Hole.JSON] = f'{{"name": "NAME", "{form.arguments_name}": ARGUMENTS}}'
    words[Hole.EACH] = written(form.argument)
    call = written(form.form)
    return f"{form.begins}{form.opens}{call}{form.closes}{form.ends}"
