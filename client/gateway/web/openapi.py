"""The gateway's own OpenAPI document, made from the structures that requests are parsed with."""

from typing import Any

import msgspec

from client.gateway.protocols.anthropic_messages import CountRequest, MessagesRequest
from client.gateway.protocols.ollama import OllamaChat, OllamaGenerate, ShowRequest
from client.gateway.protocols.openai_responses import ResponsesRequest
from client.gateway.protocols.requests import ChatRequest, CompletionRequest

ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
ANTHROPIC_ERROR = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
    },
}
OLLAMA_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {"error": {"type": "string"}},
}
EVENTS = "text/event-stream"
STATUSES = {
    "400": "The request is at fault; the message says how.",
    "401": "A key is missing or wrong.",
    "403": "This web page or this name may not ask; only where no key is asked.",
    "404": "No such model or path.",
    "405": "No such method at this path.",
    "408": "The body did not come in time.",
    "413": "The body is too large.",
    "415": "The body is not application/json, or in an encoding that is not read.",
    "417": "What Expect asks for is not known.",
    "429": "Too many requests at once, or beyond the key's quota; see Retry-After.",
    "503": "The swarm cannot serve this now; see Retry-After.",
}


def document(*, with_keys: bool) -> dict[str, Any]:
    """The document; ``with_keys`` says that requests need a key."""
    kinds = [ChatRequest, CompletionRequest, MessagesRequest, CountRequest, ResponsesRequest]
    kinds += [OllamaChat, OllamaGenerate, ShowRequest]
    (chat, completion, message, counted, asked, *others), components = (
        msgspec.json.schema_components(
            kinds,
            ref_template="#/components/schemas/{name}",
        )
    )
    components["OllamaError"] = OLLAMA_ERROR
    components["Error"] = ERROR
    components["AnthropicError"] = ANTHROPIC_ERROR
    paths = {
        "/v1/chat/completions": {
            "post": _operation(
                "Answer a chat with the model's own chat template.", body=chat, stream=EVENTS
            )
        },
        "/v1/completions": {
            "post": _operation("Continue text or token ids.", body=completion, stream=EVENTS)
        },
        "/v1/messages": {
            "post": _operation(
                "Answer a chat in Anthropic's form.",
                body=message,
                stream=EVENTS,
                error="AnthropicError",
            )
        },
        "/v1/messages/count_tokens": {
            "post": _operation(
                "Count the tokens of a chat's prompt.", body=counted, error="AnthropicError"
            )
        },
        "/v1/responses": {
            "post": _operation(
                "Answer items in the form of OpenAI's Responses; nothing is stored.",
                body=asked,
                stream=EVENTS,
            )
        },
        "/api/chat": {
            "post": _operation(
                "Answer a chat in Ollama's form.",
                body=others[0],
                stream="application/x-ndjson",
                error="OllamaError",
            )
        },
        "/api/generate": {
            "post": _operation(
                "Answer a text in Ollama's form.",
                body=others[1],
                stream="application/x-ndjson",
                error="OllamaError",
            )
        },
        "/api/show": {"post": _operation("One model.", body=others[2], error="OllamaError")},
        "/api/tags": {"get": _operation("The models.", error="OllamaError")},
        "/api/version": {"get": _operation("Ollama's version.", error="OllamaError")},
        "/v1/embeddings": {"post": _operation("Refused: the model writes text.")},
        "/v1/models": {"get": _operation("The models that are served.")},
        "/v1/models/{model}": {
            "get": {
                **_operation("One model."),
                "parameters": [
                    {
                        "name": "model",
                        "in": "path",
                        "required": True,
                        "schema": {"type": "string", "minLength": 1},
                    }
                ],
            }
        },
        "/health": {"get": _operation("Whether all layers are held, and which are not.")},
        "/metrics": {"get": _operation("Figures for Prometheus.", media="text/plain")},
        "/openapi.json": {"get": _operation("This document.")},
    }
    found: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "Anabranch gateway",
            "version": "1",
            "description": "OpenAI's interface in front of a swarm.",
        },
        "paths": paths,
        "components": {"schemas": components},
    }
    if with_keys:
        found["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        for path, methods in paths.items():
            if path.startswith(("/v1/", "/api/")):
                for operation in methods.values():
                    operation["security"] = [{"key": []}]
    return found


def _operation(
    summary: str,
    *,
    body: dict[str, Any] | None = None,
    stream: str = "",
    media: str = "application/json",
    error: str = "Error",
) -> dict[str, Any]:
    content: dict[str, Any] = {media: {"schema": {} if media != "text/plain" else _TEXT}}
    if stream:
        content[stream] = {}
    shape = {"$ref": f"#/components/schemas/{error}"}
    failed = {"application/json": {"schema": shape}}
    responses: dict[str, Any] = {"200": {"description": "The answer.", "content": content}}
    for status, text in STATUSES.items():
        responses[status] = {"description": text, "content": failed}
    operation: dict[str, Any] = {"summary": summary, "responses": responses}
    if body is not None:
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": body}},
        }
    return operation


_TEXT = {"type": "string"}
