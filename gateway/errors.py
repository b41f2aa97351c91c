"""Errors a client sees: OpenAI's error object and the status that goes with it.

Raised anywhere in the gateway; the HTTP edge turns them into a response, or into an ``error``
event when the stream has already begun. Anything else that escapes is a bug of ours (500).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

_SHOWN_CHARACTERS = 40
_MAX_MESSAGE_CHARACTERS = 1000


def shown(value: float | str) -> str:
    """``value`` for a message: numbers as people write them, and nothing at a client's length."""
    text = f"{value:g}" if isinstance(value, float) else str(value)
    if len(text) > _SHOWN_CHARACTERS:
        return f"{text[:_SHOWN_CHARACTERS]}... ({len(text)} characters)"
    return text


class ErrorBody(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorObject(msgspec.Struct, frozen=True):
    """The JSON that OpenAI clients read: ``{"error": {...}}``."""

    error: ErrorBody


class ApiError(Exception):
    """Base of all errors meant for the client.

    ``status``: HTTP status. ``type``, ``code``, ``param``: as in OpenAI's error object.
    ``headers``: sent along with the status.
    """

    status = 500
    type = "server_error"
    code: str | None = None

    def __init__(
        self, message: str, *, param: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        # Both may quote the client, who may have sent megabytes.
        message = message[:_MAX_MESSAGE_CHARACTERS]
        super().__init__(message)
        self.message = message
        self.param = param[:_MAX_MESSAGE_CHARACTERS] if param else None
        self.headers = dict(headers or {})

    def body(self) -> bytes:
        """The error object as JSON."""
        return msgspec.json.encode(
            ErrorObject(ErrorBody(self.message, self.type, self.param, self.code))
        )


class InvalidRequest(ApiError):
    """The request itself is wrong; sending it again cannot help."""

    status = 400
    type = "invalid_request_error"


class InvalidJson(InvalidRequest):
    code = "invalid_json"


class UnknownField(InvalidRequest):
    code = "unknown_parameter"


class UnsupportedField(InvalidRequest):
    code = "unsupported_parameter"


class InvalidValue(InvalidRequest):
    code = "invalid_value"


class InvalidType(InvalidRequest):
    code = "invalid_type"


class ContextTooLong(InvalidRequest):
    """Prompt and requested output do not fit the model's context."""

    code = "context_length_exceeded"


class MalformedHttp(InvalidRequest):
    """What arrived is no HTTP request."""

    code = "invalid_http"


class HeadTooLarge(InvalidRequest):
    """The request line and headers are more than the gateway takes."""

    status = 431
    code = "headers_too_large"


class WrongKey(InvalidRequest):
    """No API key, or one that nobody has. Never says which was presented."""

    status = 401
    code = "invalid_api_key"


class Forbidden(ApiError):
    """Whoever asks may not do this."""

    status = 403
    type = "permission_error"
    code = "forbidden"


class UnsupportedEncoding(InvalidRequest):
    """The body is compressed."""

    status = 415
    code = "unsupported_encoding"


class BodyTooLarge(InvalidRequest):
    status = 413
    code = "body_too_large"


class NotFound(InvalidRequest):
    status = 404
    code = "not_found"


class ModelNotFound(NotFound):
    code = "model_not_found"


class MethodNotAllowed(InvalidRequest):
    status = 405
    code = "method_not_allowed"


class SlowRequest(InvalidRequest):
    """The client did not send a request's head or body in time."""

    status = 408
    code = "request_timeout"


class Overloaded(ApiError):
    """No room now; ``retry_after_s`` says when to try again."""

    status = 429
    type = "rate_limit_error"
    code = "queue_full"

    def __init__(
        self, message: str, *, retry_after_s: float, headers: Mapping[str, str] | None = None
    ) -> None:
        # The header takes whole seconds; 0 would invite an immediate retry.
        after = {"Retry-After": str(max(1, math.ceil(retry_after_s)))}
        super().__init__(message, headers={**(headers or {}), **after})


class RateLimited(Overloaded):
    """The client's key has used what it may use for now."""

    code = "rate_limit_exceeded"


class TooManyConnections(Overloaded):
    """The gateway has as many connections as it takes."""

    status = 503
    type = "service_unavailable_error"
    code = "too_many_connections"


class Unavailable(ApiError):
    """The mesh cannot run a token now; the message says why."""

    status = 503
    type = "service_unavailable_error"
    code = "not_ready"

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message, headers={"Retry-After": str(max(1, math.ceil(retry_after_s)))})


class GenerationFailed(ApiError):
    """A sequence ended with an error inside the mesh."""

    code = "generation_failed"


class TimedOut(ApiError):
    """The request took longer than it may: X-Request-Timeout or ``gateway.request_timeout_s``."""

    status = 504
    type = "timeout_error"
    code = "timeout"
