"""The grammars of what requests want their answers to be: a format, calls, or either. Pure."""

from collections.abc import Mapping
from typing import Any

import msgspec

from client.gateway.errors import bad_request
from client.gateway.protocols.messages import ToolChoice
from client.gateway.protocols.requests import ChatRequest, CompletionRequest
from client.gateway.structured.call_formats import CallFormat
from client.gateway.structured.calls_grammar import calls_grammar
from client.gateway.structured.channels import Channels
from client.gateway.structured.grammar import of_choice, of_regex, of_schema, schema_in
from dht.messages.session import SESSION_BOUNDS

GUIDES = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
"""vLLM's fields for the format of an answer."""
OUTPUTS = {
    "json": "guided_json",
    "regex": "guided_regex",
    "choice": "guided_choice",
    "grammar": "guided_grammar",
    "json_object": "",
}
"""Fields of ``structured_outputs``, by what they were called before."""
START = "start: "


def format_grammar(request: CompletionRequest | ChatRequest) -> str:
    """The grammar of what a request wants its answer to be; empty: any text. Raises ApiError."""
    grammars = {name: _grammar_of(name, wanted) for name, wanted in _formats(request).items()}
    if len(grammars) > 1:
        names = " and ".join(grammars)
        raise bad_request(f"{names} cannot be followed at once", next(reversed(grammars)))
    for name, grammar in grammars.items():
        try:
            size_bytes = len(grammar.encode())
        except UnicodeEncodeError:
            raise bad_request(f"{name} is not valid UTF-8 text", name) from None
        if size_bytes > SESSION_BOUNDS.grammar_bytes_max:
            raise bad_request(
                f"{name} has {size_bytes} bytes; {SESSION_BOUNDS.grammar_bytes_max} at most", name
            )
    return next(iter(grammars.values()), "")


def is_free(request: ChatRequest) -> bool:
    """Whether a request leaves it to the model what its answer is: it may think before."""
    return not request.requires_call and not wants_format(request)


def wants_format(request: CompletionRequest | ChatRequest) -> bool:
    """Whether a request wants its answer to be in a format (see :func:`format_grammar`)."""
    return bool(_formats(request))


def _formats(request: CompletionRequest | ChatRequest) -> dict[str, Any]:
    """What a request wants its answer to be, by the field that says so."""
    form = request.response_format
    guides = {name: getattr(request, name) for name in GUIDES}
    outputs = request.structured_outputs
    for name, kind in OUTPUTS.items():
        if outputs is not None and (guide := getattr(outputs, name)) not in (None, False):
            guides[f"structured_outputs.{name}"] = guide if kind else {"type": "object"}
    return {
        **({} if form is None or form.type == "text" else {"response_format": form}),
        **{name: guide for name, guide in guides.items() if guide is not None},
    }


def _grammar_of(name: str, wanted: Any) -> str:
    """The grammar of the format ``wanted`` in the field ``name``; raises ApiError."""
    param, name = name, OUTPUTS.get(name.removeprefix("structured_outputs."), name)
    match name or "guided_json":
        case "guided_grammar":
            return str(wanted)
        case "guided_json":
            term = of_schema(schema_in(wanted, param))
        case "guided_regex":
            term = of_regex(wanted)
        case "guided_choice":
            term = of_choice(wanted)
        case _ if wanted.type == "json_object":
            term = of_schema(wanted.schema or {"type": "object"})
        case _:
            named = wanted.json_schema
            schema = wanted.schema if named is None or named.schema is None else named.schema
            if schema is None:
                raise bad_request(f"{name} has no json_schema with a schema", name)
            term = of_schema(schema)
    return f"{START}{term}"


def tools_grammar(
    request: ChatRequest,
    form: CallFormat | None,
    channels: Channels | None,
    marks: Mapping[str, str],
    wanted: str = "",
    *,
    opened: bool = False,
) -> str:
    """The grammar that makes calls valid where the request asks for that; empty: none.

    ``marks`` are terms of special tokens; ``wanted`` is the grammar of an answer that calls nothing
    (:func:`format_grammar`), empty: any text. ``opened``: the prompt ends within thoughts. Raises
    ApiError (400).
    """
    if isinstance(request.tool_choice, ToolChoice):
        name = request.tool_choice.name
        chosen = [tool for tool in request.offered if tool.function.name == name]
        if not chosen:
            raise bad_request(f"tool_choice names {name!r}, which tools has not", "tool_choice")
    else:
        chosen = request.offered
    required = request.requires_call
    if required and not chosen:
        raise bad_request("tool_choice wants a call, but there are no tools", "tool_choice")
    if not chosen:
        return ""
    if form is None:
        reason = "this model's chat template has no way to call tools that is known here"
        raise bad_request(reason, "tools")
    if not required and not wanted and not any(tool.function.strict for tool in chosen):
        return ""
    return calls_grammar(
        form,
        [msgspec.to_builtins(tool.function) for tool in chosen],
        required=required,
        parallel=request.parallel_tool_calls is not False
        and not isinstance(request.tool_choice, ToolChoice),
        marks=marks,
        channels=channels,
        otherwise=_term_of(wanted) if wanted else None,
        opened=opened,
    )


def _term_of(grammar: str) -> str:
    """A whole grammar as a term within another."""
    one_rule = grammar.startswith(f"{START}%json") and "\n" not in grammar
    return grammar.removeprefix(START) if one_rule else f"%lark {{\n{grammar}\n}}"
