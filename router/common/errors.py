"""``ApiError``: errors in OpenAI's format, ``{"error": {"message", "type", "param", "code"}}``.

Other dialects write them in a format of their own (``WriteError``). The functions below make the
errors of each status; all parts of the router raise them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.types import Scope

from protocol.errors import BatonError

log = logging.getLogger(__name__)

RETRY_AFTER = {"retry-after": "1"}
MAX_RETRY_AFTER_S = 60


class ApiError(BatonError):
    """An error that is sent to the client. ``param``: the wrong field of the request, if any."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",  # noqa: A002 - OpenAI's name
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        overflow: tuple[int, int] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code
        self.headers = dict(headers or {})
        self.overflow = overflow
        """Tokens of a prompt that is too long, and the most that the model takes."""

    def body(self) -> bytes:
        """Return the JSON of a response body or of an SSE event."""
        error = {
            "message": self.message,
            "type": self.type,
            "param": self.param,
            "code": self.code,
        }
        return msgspec.json.encode({"error": error})

    def response(self) -> Response:
        return Response(
            self.body(), self.status, headers=self.headers, media_type="application/json"
        )


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Return a 400: the request itself is wrong."""
    return ApiError(400, message, param=param, code=code)


def unavailable(message: str) -> ApiError:
    """Return a 503 with Retry-After: no worker can take the request now."""
    return ApiError(503, message, type="service_unavailable", code="no_worker", headers=RETRY_AFTER)


def overloaded(message: str, retry_after_s: float) -> ApiError:
    """Return a 429 with Retry-After: the router has too much work."""
    known_s = MAX_RETRY_AFTER_S if math.isnan(retry_after_s) else retry_after_s
    headers = {"retry-after": str(math.ceil(max(1.0, min(MAX_RETRY_AFTER_S, known_s))))}
    return ApiError(429, message, type="rate_limit_error", code="overloaded", headers=headers)


def unauthorized(message: str) -> ApiError:
    headers = {"www-authenticate": "Bearer"}
    return ApiError(401, message, code="invalid_api_key", headers=headers)


def forbidden(message: str) -> ApiError:
    """Return a 403: the API key is known, but may not do this."""
    return ApiError(403, message, type="permission_error", code="insufficient_scope")


def rate_limited(message: str, retry_after_s: float) -> ApiError:
    """Return a 429 with Retry-After: the tenant has used what its limits allow.

    The time is exact, so it has no upper bound, unlike that of ``overloaded``.
    """
    headers = {"retry-after": str(max(1, math.ceil(retry_after_s)))}
    return ApiError(
        429, message, type="rate_limit_error", code="rate_limit_exceeded", headers=headers
    )


def timed_out(message: str) -> ApiError:
    return ApiError(504, message, type="timeout_error", code="timeout")


def internal_error(message: str, code: str = "internal_error") -> ApiError:
    return ApiError(500, message, type="server_error", code=code)


def router_failed() -> ApiError:
    """Return a 500: a bug of the router, which is logged."""
    return internal_error("the router failed on this request; its log has details")


WriteError = Callable[[Scope, ApiError], Response]
"""Returns the response for an error in the dialect of the request's path."""


def write_openai_error(_scope: Scope, error: ApiError) -> Response:
    return error.response()


def _http_error(request: Request, error: HTTPException) -> ApiError:
    """Return Starlette's own 404 and 405 as errors of the API."""
    # Not request.url: it contains the Host header, which may be anything.
    what = f"{request.method} {request.scope['path'][:200]}"
    headers = {name.lower(): value for name, value in (error.headers or {}).items()}
    allowed = headers.get("allow", "")
    if allowed:
        headers["allow"] = allowed = ", ".join(sorted(allowed.split(", ")))
    messages = {
        404: (f"{what}: there is no such path", "not_found"),
        405: (f"{what}: this path accepts only {allowed}", "method_not_allowed"),
    }
    message, code = messages.get(error.status_code, (str(error.detail), None))
    return ApiError(error.status_code, message, code=code, headers=headers)


def _exception_error(request: Request, error: Exception) -> ApiError:
    request_id = request.scope.get("state", {}).get("request_id", "")
    path = request.scope["path"][:200]
    log.error("request %s, %s %r, failed", request_id, request.method, path, exc_info=error)
    return router_failed()


def install_error_handlers(app: FastAPI, write: WriteError = write_openai_error) -> None:
    """Make the app return all errors as ``write`` does."""

    async def on_error(request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException):
            return write(request.scope, _http_error(request, error))
        if isinstance(error, ApiError):
            return write(request.scope, error)
        return write(request.scope, _exception_error(request, error))

    for kind in (ApiError, HTTPException, Exception):
        app.add_exception_handler(kind, on_error)
