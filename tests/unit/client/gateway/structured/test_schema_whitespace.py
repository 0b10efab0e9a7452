"""White space in answers by a schema: bounded, or none where the request wants none."""

import json
from typing import Any

import pytest

from client.gateway.structured.grammar import WHITESPACE, of_schema


@pytest.mark.parametrize(
    ("asked", "given"),
    [
        ({}, WHITESPACE),
        ({"item_separator": ","}, WHITESPACE | {"item_separator": ","}),
        ({"whitespace_pattern": " ?"}, {"whitespace_pattern": " ?"}),
        ({"whitespace_flexible": False}, {"whitespace_flexible": False}),
    ],
)
def test_a_requests_own_wish_goes_before_our_bound(
    asked: dict[str, Any], given: dict[str, Any]
) -> None:
    term = of_schema({"type": "object", "x-guidance": asked})
    assert json.loads(term.removeprefix("%json "))["x-guidance"] == given
