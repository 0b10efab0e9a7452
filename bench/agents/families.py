"""How models of a template's family write what a cell needs of them, spelled out."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from client.gateway.structured.channels import TAGGED_THOUGHTS

Arguments = Mapping[str, str]


def _tagged(name: str, given: Arguments) -> str:
    call = json.dumps({"name": name, "arguments": given})
    return f"<tool_call>\n{call}\n</tool_call>"


def _functions(name: str, given: Arguments) -> str:
    each = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in given.items())
    return f"<tool_call>\n<function={name}>\n{each}</function>\n</tool_call>"


def _keys(name: str, given: Arguments) -> str:
    each = "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n"
        for key, value in given.items()
    )
    return f"<tool_call>{name}\n{each}</tool_call>"


def _bare(name: str, given: Arguments) -> str:
    return json.dumps({"name": name, "parameters": given})


def _listed(name: str, given: Arguments) -> str:
    return "[TOOL_CALLS]" + json.dumps([{"name": name, "arguments": given}])


def _message(name: str, given: Arguments) -> str:
    head = f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
    return head + json.dumps(given)


def _separated(name: str, given: Arguments) -> str:
    call = f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{json.dumps(given)}<｜tool▁call▁end｜>"
    return f"<｜tool▁calls▁begin｜>{call}<｜tool▁calls▁end｜>"


def _numbered(name: str, given: Arguments) -> str:
    head = f"<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>"
    call = f"{head}{json.dumps(given)}<|tool_call_end|>"
    return f"<|tool_calls_section_begin|>{call}<|tool_calls_section_end|>"


CALLS: Mapping[str, Callable[[str, Arguments], str]] = {
    "Hermes": _tagged,
    "Qwen3": _tagged,
    "Qwen3.5": _functions,
    "Llama 3": _bare,
    "Mistral": _listed,
    "gpt-oss": _message,
    "GLM": _keys,
    "DeepSeek": _separated,
    "Kimi K2": _numbered,
}
"""How models of a family write a call; the others have no way to."""
ONE_CALL = frozenset({"gpt-oss"})
"""Families whose answers end with their first call."""
_FINAL = {"gpt-oss": "<|channel|>final<|message|>"}
_THINKS = {"gpt-oss": "<|channel|>analysis<|message|>{}<|end|><|start|>assistant"}
_MARKED = frozenset({"Qwen3", "DeepSeek", "GLM"})
"""Families whose templates have marks of thoughts."""


def calls(family: str, *made: tuple[str, Arguments]) -> str:
    """An answer that calls functions; raises KeyError for a family that has no way to."""
    between = "; " if family == "Llama 3" else ""
    return between.join(CALLS[family](name, given) for name, given in made)


def says(family: str, text: str) -> str:
    """An answer that says ``text``."""
    return _FINAL.get(family, "") + text


def thinks(family: str, thought: str) -> str | None:
    """What stands before an answer that was thought over; None: the family has no such thing."""
    if family in _MARKED:
        return f"<think>{thought}</think>\n\n"
    return _THINKS[family].format(thought) if family in _THINKS else None


def behind(prompt: str, answer: str) -> str:
    """The answer to a prompt that may end within thoughts: these end first, as models do."""
    if TAGGED_THOUGHTS.opened_by(prompt) is None:
        return answer
    opens, closes = TAGGED_THOUGHTS.thoughts
    return answer.removeprefix(opens) if answer.startswith(opens) else f"{closes}\n\n{answer}"


def could_call(error: Any, family: str) -> bool:
    """Whether ``error`` is more than what a family without calls has to be told."""
    return family in CALLS or "no way to call" not in str(error)
