"""Errors as HTTP answers, each in the form of who asks."""

import msgspec
from aiohttp import web

from client.gateway.errors import ApiError
from client.gateway.protocols import anthropic_messages, ollama
from client.gateway.web.bodies import too_large
from dht.process.json_file import Json

ANTHROPIC_HEADER, ANTHROPIC_PART = "anthropic-version", "messages"
"""What requests have whose errors are in Anthropic's form: the header of its clients, or a part of
the path."""


def json_answer(body: Json, status: int = 200) -> web.Response:
    """A body as JSON."""
    return web.json_response(body=msgspec.json.encode(body), status=status)


def is_of_ollama(request: web.BaseRequest) -> bool:
    """Whether a request is to Ollama's interface, by its path."""
    return "/api/" in request.path


def error_body(request: web.BaseRequest, error: ApiError) -> Json:
    """An error's body in the form of who asks."""
    if is_of_ollama(request):
        return ollama.error_of(error)
    is_anthropic = ANTHROPIC_HEADER in request.headers or ANTHROPIC_PART in request.path.split("/")
    return anthropic_messages.error_of(error) if is_anthropic else error.body


def answer_to(request: web.BaseRequest, error: web.HTTPException) -> web.Response:
    """An error of aiohttp in the form of who asks."""
    response = error_response(request, _of_http(request, error))
    if "Allow" in error.headers:
        response.headers["Allow"] = error.headers["Allow"]
    return response


def error_response(request: web.BaseRequest, error: ApiError) -> web.Response:
    """An error in the form of who asks: Ollama's, Anthropic's, or OpenAI's."""
    response = json_answer(error_body(request, error), error.status)
    if error.retry_after_s is not None:
        response.headers["Retry-After"] = str(error.retry_after_s)
    if error.status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    if error.status in {408, 413}:
        response.force_close()
    return response


def _of_http(request: web.BaseRequest, error: web.HTTPException) -> ApiError:
    match error.status:
        case 404:
            return ApiError(
                404, "there is nothing at this path; see /openapi.json", code="not_found"
            )
        case 405:
            taken = error.headers.get("Allow", "").replace(",", " or ")
            reason = f"{request.method[:80]} is not for this path: send {taken}"
            return ApiError(405, reason, code="method_not_allowed")
        case 413:
            return too_large()
        case 417:
            said = request.headers.get("Expect", "")[:80]
            return ApiError(417, f"'Expect: {said}' is not known here: send 100-continue or none")
        case status:
            return ApiError(status, error.reason or "the request failed")
