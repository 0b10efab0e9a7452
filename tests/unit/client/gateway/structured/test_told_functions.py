"""Functions told in words: in the system message, with a call as the model writes it."""

import json
from typing import Any

import pytest

from client.gateway.structured.answer_reader import AnswerReader
from client.gateway.structured.call_formats import (
    CALL_FORMATS,
    SEPARATED_JSON,
    CallFormat,
    shows_functions,
)
from client.gateway.structured.calls import Call
from client.gateway.structured.channels import MESSAGES
from client.gateway.structured.told_functions import example_of, told_of, with_functions

FUNCTIONS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
]
HI = {"role": "user", "content": "Hi"}


def test_functions_stand_in_the_system_message() -> None:
    told = told_of(SEPARATED_JSON, FUNCTIONS)
    assert json.dumps(FUNCTIONS[0]["function"]) in told
    system = {"role": "system", "content": "Be short."}
    assert with_functions([HI], SEPARATED_JSON, FUNCTIONS) == [
        {"role": "system", "content": told},
        HI,
    ]
    assert with_functions([system, HI], SEPARATED_JSON, FUNCTIONS) == [
        {"role": "system", "content": f"Be short.\n\n{told}"},
        HI,
    ]


@pytest.mark.parametrize("form", CALL_FORMATS)
def test_a_call_that_follows_the_example_is_read(form: CallFormat) -> None:
    called = example_of(form).replace("NAME", "weather").replace("ARGUMENTS", '{"a": "b"}')
    called = called.replace("ARGUMENT", "a").replace("VALUE", "b")
    reader = AnswerReader(form, MESSAGES if form.in_channel else None)
    found = [*reader.push(called), *reader.flush()]
    assert found == [Call(name="weather", arguments='{"a": "b"}')]


@pytest.mark.parametrize(
    ("template", "shows"),
    [("{% if tools %}", True), ("{{ tool_calls }}", False), ("<｜tool▁calls▁begin｜>", False)],
)
def test_a_template_shows_functions_where_it_reads_them(template: str, shows: bool) -> None:
    assert shows_functions(template) is shows
