"""What goes wrong with a request, in the form that OpenAI's clients read."""

from dataclasses import dataclass
from typing import Any


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

    def __post_init__(self) -> None:
        Exception.__init__(self, self.message)

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


def unavailable(message: str, retry_after_s: int) -> ApiError:
    """The swarm cannot serve this now."""
    return ApiError(
        503, message, type="server_error", code="unavailable", retry_after_s=retry_after_s
    )


def too_many(message: str, retry_after_s: int) -> ApiError:
    """More requests than this gateway takes at once."""
    return ApiError(
        429,
        message,
        type="rate_limit_error",
        code="rate_limit_exceeded",
        retry_after_s=retry_after_s,
    )
