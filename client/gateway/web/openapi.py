"""The gateway's own OpenAPI document, made from the structures that requests are parsed with."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """A path that the gateway answers at."""

    method: str
    path: str
    summary: str = ""
    """Empty: it is not documented."""
    body: type[msgspec.Struct] | None = None
    """The structure that requests are parsed with."""
    media: str = "application/json"
    streams: bool = False
    """Whether the answer may come as a stream."""

    @property
    def name(self) -> str:
        """The path as it is documented and counted."""
        return self.path.replace(":.+", "")

    @property
    def is_api(self) -> bool:
        """Whether programs call it, with a key where keys are asked."""
        return self.path.startswith(("/v1/", "/api/"))

    @property
    def stream(self) -> str:
        """The media type of the answer as a stream."""
        return "application/x-ndjson" if self.path.startswith("/api/") else "text/event-stream"

    @property
    def error(self) -> str:
        """The name of the component that errors have the form of."""
        if self.path.startswith("/api/"):
            return "OllamaError"
        return "AnthropicError" if "messages" in self.path.split("/") else "Error"


def document(endpoints: Iterable[Endpoint], *, with_keys: bool) -> dict[str, Any]:
    """The document; ``with_keys`` says that requests need a key."""
    told = [each for each in endpoints if each.summary]
    kinds = list(dict.fromkeys(each.body for each in told if each.body is not None))
    schemas, components = msgspec.json.schema_components(
        kinds, ref_template="#/components/schemas/{name}"
    )
    bodies = dict(zip(kinds, schemas, strict=True))
    components["OllamaError"] = OLLAMA_ERROR
    components["Error"] = ERROR
    components["AnthropicError"] = ANTHROPIC_ERROR
    paths: dict[str, Any] = {}
    for each in told:
        body = None if each.body is None else bodies[each.body]
        operation = paths.setdefault(each.name, {})[each.method.lower()] = _operation(each, body)
        if with_keys and each.is_api:
            operation["security"] = [{"key": []}]
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
    return found


def _operation(endpoint: Endpoint, body: dict[str, Any] | None) -> dict[str, Any]:
    media = endpoint.media
    content: dict[str, Any] = {media: {"schema": {} if media != "text/plain" else _TEXT}}
    if endpoint.streams:
        content[endpoint.stream] = {}
    shape = {"$ref": f"#/components/schemas/{endpoint.error}"}
    failed = {"application/json": {"schema": shape}}
    responses: dict[str, Any] = {"200": {"description": "The answer.", "content": content}}
    for status, text in STATUSES.items():
        responses[status] = {"description": text, "content": failed}
    operation: dict[str, Any] = {"summary": endpoint.summary, "responses": responses}
    if body is not None:
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": body}},
        }
    if names := re.findall(r"{(\w+)}", endpoint.name):
        named = {"in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        operation["parameters"] = [{"name": name, **named} for name in names]
    return operation


_TEXT = {"type": "string"}
