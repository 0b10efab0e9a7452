"""The interfaces that ask for answers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from client.gateway.protocols import anthropic_messages, ollama, openai_responses
from client.gateway.protocols.blocks import AnswerWriter, AsItIs
from client.gateway.protocols.requests import ChatRequest, CompletionRequest
from dht.process.json_file import Json


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """An interface that asks for answers: its requests, as those to OpenAI's chats or completions,
    and how answers are written."""

    kind: type[msgspec.Struct]
    chat_of: Callable[[Any], ChatRequest | CompletionRequest] = lambda request: request
    """Raises ApiError (400)."""
    bare: Callable[[ChatRequest], ChatRequest | CompletionRequest] = lambda chat: chat
    """What a chat becomes for a model without a chat template."""
    writer: Callable[[Any], AnswerWriter] = AsItIs
    """Made of a request."""
    at_once: Callable[[Any, int], Json | None] = lambda request, now_s: None
    """The answer to a request that asks the model for nothing, at a Unix time in whole seconds."""
    params: Mapping[str, str] = field(default_factory=dict)
    """Fields of a chat whose names differ."""


CHATS = Dialect(kind=ChatRequest)
COMPLETIONS = Dialect(kind=CompletionRequest)
MESSAGES = Dialect(
    kind=anthropic_messages.MessagesRequest,
    chat_of=anthropic_messages.chat_of_messages,
    writer=anthropic_messages.MessageWriter,
    params=anthropic_messages.PARAMS,
)
RESPONSES = Dialect(
    kind=openai_responses.ResponsesRequest,
    chat_of=openai_responses.chat_of_response,
    writer=openai_responses.ResponseWriter,
    params=openai_responses.PARAMS,
)
OLLAMA_CHATS = Dialect(
    kind=ollama.OllamaChat,
    chat_of=ollama.chat_of,
    writer=ollama.OllamaWriter,
    params=ollama.PARAMS,
    at_once=ollama.loaded,
)
OLLAMA_TEXTS = Dialect(
    kind=ollama.OllamaGenerate,
    chat_of=ollama.chat_or_text_of,
    bare=ollama.bare_text_of,
    writer=ollama.OllamaWriter,
    params=ollama.PARAMS,
    at_once=ollama.loaded,
)
