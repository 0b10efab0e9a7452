"""Values of arguments that a model writes as text, by the schema of the function."""

from typing import Any

import pytest

from client.gateway.structured.calls import value_of
from client.gateway.structured.schemas import ArgumentTypes

ROOT = {"$defs": {"Id": {"type": "string"}, "Loop": {"$ref": "#/$defs/Loop"}}}


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("5", {"type": "string"}, "5"),
        (" a\n", {"type": "string"}, " a\n"),
        ('"5"', {"type": "string"}, '"5"'),
        ("5", {"type": "integer"}, 5),
        (" 5\n", {"type": "integer"}, 5),
        ("5", {"type": "number"}, 5),
        ("five", {"type": "integer"}, "five"),
        ("9" * 5000, {"type": "integer"}, "9" * 5000),
        ("true", {"type": "boolean"}, True),
        ("True", {"type": "boolean"}, True),
        ("None", {"type": ["integer", "null"]}, None),
        ("None", {"type": ["string", "null"]}, None),
        ("None", {"type": "string"}, "None"),
        ("null", {"type": ["string", "null"]}, None),
        ("5", {"type": ["string", "null"]}, "5"),
        ("5", {"anyOf": [{"type": "string"}, {"type": "integer"}]}, 5),
        ("5.5", {"anyOf": [{"type": "string"}, {"type": "integer"}]}, "5.5"),
        ("5", {"anyOf": [{"type": "string"}, {"type": "number"}]}, 5),
        ("5", {"enum": ["5", "6"]}, "5"),
        ("5", {"enum": [5, "6"]}, 5),
        ("5", {"const": "5"}, "5"),
        ("5", {"$ref": "#/$defs/Id"}, "5"),
        ("5", {"allOf": [{"$ref": "#/$defs/Id"}]}, "5"),
        ("5", {"$ref": "#/$defs/Loop"}, 5),
        ("5", {"$ref": "#/$defs/none"}, 5),
        ("5", {}, 5),
        ("five", {}, "five"),
        ('"five"', {}, '"five"'),
        ('["a", {"b": null}]', {"type": "array"}, ["a", {"b": None}]),
        ('["a"', {"type": "array"}, '["a"'),
        ("NaN", {"type": "number"}, "NaN"),
        ("1e999", {"type": "number"}, "1e999"),
        ("[" * 100_000, {"type": "array"}, "[" * 100_000),
        ("5", {"type": 7}, 5),
        ("5", {"anyOf": [{"anyOf": 1}]}, 5),
        ("5", "no schema", 5),
    ],
)
def test_a_string_is_the_text_and_all_else_is_json(text: str, schema: Any, value: Any) -> None:
    types = ArgumentTypes({"f": {**ROOT, "properties": {"x": schema}}})
    found = value_of(text, types.of("f", "x"))
    assert found == value
    assert type(found) is type(value)
