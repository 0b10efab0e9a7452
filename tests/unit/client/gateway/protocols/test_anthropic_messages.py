"""Anthropic's messages, as they are read."""

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from client.gateway.protocols.anthropic_messages import MessagesRequest, chat_of_messages
from client.gateway.protocols.requests import parse_request


def told(content: Any) -> str:
    result = {"type": "tool_result", "tool_use_id": "t", "content": content}
    body = {"max_tokens": 1, "messages": [{"role": "user", "content": [result]}]}
    request = parse_request(json.dumps(body).encode(), MessagesRequest)
    return str(chat_of_messages(request).messages[0].content)


def test_only_blocks_that_may_be_results_are_tried_as_such(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Four million numbers took 46 s, nearly all of it for errors that nobody saw."""
    tried: list[object] = []
    convert: Callable[..., Any] = msgspec.convert

    def counted(part: object, *rest: Any) -> Any:
        tried.append(part)
        return convert(part, *rest)

    monkeypatch.setattr(msgspec, "convert", counted)
    text = {"type": "text", "text": "a"}
    strange: list[Any] = [0, [], {}, {"type": 7}, {"type": ["text"]}, {"type": "weather"}]
    lines = told([text, *strange, None, {"type": "text"}, "b"]).split("\n")
    assert lines[:4] == ["a", "0", "[]", "{}"]
    assert "'weather'" in lines[6]
    assert lines[-1] == "b"
    assert tried == [text, {"type": "text"}]
