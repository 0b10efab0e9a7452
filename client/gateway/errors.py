"""What goes wrong with a request, in the form that OpenAI's clients read."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

CONTEXT_EXCEEDED = "context_length_exceeded"
"""The code that clients know of a prompt or an answer that is too long."""
RETRY_AFTER_S = 5
"""When to come back where nobody knows when there is room again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TooLong:
    """Tokens that a context cannot take, in the words that clients look for."""

    context: int
    prompt: int
    """At least, where ``is_whole`` is false: then the prompt was not counted to its end."""
    new: int = 0
    """Tokens asked for behind the prompt; 0 where the prompt alone is too long."""
    is_whole: bool = True

    def __str__(self) -> str:
        """In OpenAI's words."""
        begins = f"This model's maximum context length is {self.context} tokens. However, "
        if self.new:
            return (
                f"{begins}you requested {self.prompt + self.new} tokens ({self.prompt} in the"
                f" messages, {self.new} in the completion). Please reduce the length of the"
                " messages or completion."
            )
        least = "" if self.is_whole else "at least "
        return (
            f"{begins}your messages resulted in {least}{self.prompt} tokens. Please reduce the"
            " length of the messages."
        )

    @property
    def for_anthropic(self) -> str:
        """In Anthropic's words."""
        if self.new:
            return (
                f"input length and `max_tokens` exceed context limit: {self.prompt} + {self.new} >"
                f" {self.context}, decrease input length or `max_tokens` and try again"
            )
        return f"prompt is too long: {self.prompt} tokens > {self.context} maximum (the context)"


@dataclass(slots=True)
class ApiError(Exception):
    """An answer with a status of 400 or more. ``message`` is one plain sentence."""

    status: int
    message: str
    type: str = "invalid_request_error"
    param: str | None = None
    """The field at fault, where one is."""
    code: str | None = None
    retry_after_s: int | None = None
    too_long: TooLong | None = None
    """Set where that is what is wrong."""

    def __post_init__(self) -> None:
        # A header may be no UTF-8: aiohttp keeps such bytes as characters that no JSON has.
        self.message = self.message.encode(errors="replace").decode()
        Exception.__init__(self, self.message)

    def renamed(self, names: Mapping[str, str]) -> "ApiError":
        """The same error in an interface where fields have these ``names``."""
        known = self.param or ""
        if (name := names.get(known)) is None:
            return self
        behind = self.message.removeprefix(known)
        said = self.message if behind == self.message else f"{name}{behind}"
        return replace(self, param=name, message=said)

    @property
    def body(self) -> dict[str, Any]:
        """The JSON object that is sent."""
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A mistake in the request that the caller can mend."""
    return ApiError(400, message, param=param, code=code)


def not_text(param: str, kind: str) -> ApiError:
    """A part of a message, of this kind, that is no text and no result of a call."""
    return bad_request(f"{param}: {kind[:80]} is not supported here: the model reads text", param)


def beyond_context(too_long: TooLong, param: str) -> ApiError:
    """More tokens than the model's context takes."""
    error = bad_request(str(too_long), param, CONTEXT_EXCEEDED)
    error.too_long = too_long
    return error


def unavailable(message: str, retry_after_s: int = RETRY_AFTER_S) -> ApiError:
    """The swarm cannot serve this now."""
    return ApiError(
        503, message, type="server_error", code="unavailable", retry_after_s=retry_after_s
    )


def too_many(message: str, retry_after_s: int = RETRY_AFTER_S) -> ApiError:
    """More requests than this gateway takes at once."""
    return ApiError(
        429,
        message,
        type="rate_limit_error",
        code="rate_limit_exceeded",
        retry_after_s=retry_after_s,
    )
