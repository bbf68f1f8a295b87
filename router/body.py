"""Reads the body of a request: bounded, and JSON or refused."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import Request
from starlette.requests import ClientDisconnect

from router.errors import ApiError, invalid


class ClientGone(Exception):
    """The client hung up: there is nobody to answer."""


async def read_object(request: Request, limit: int) -> dict[str, Any]:
    """The JSON object in the body, of at most ``limit`` bytes. Raises ApiError or ClientGone."""
    _check_type(request.headers.get("content-type"))
    data = await _read(request, limit)
    try:
        value = msgspec.json.decode(data)
    except RecursionError:
        raise invalid("the body is nested too deeply", code="invalid_json") from None
    except ValueError as error:  # msgspec.DecodeError and UnicodeDecodeError
        raise invalid(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise invalid(
            f"the body must be a JSON object, not {type(value).__name__}", code="invalid_json"
        )
    return value


def _check_type(content_type: str | None) -> None:
    if content_type is None:
        return
    kind = content_type.partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(
            415,
            f"expected content-type application/json, got {kind[:80]!r}",
            code="unsupported_media_type",
        )


async def _read(request: Request, limit: int) -> bytes:
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced[:20]) > limit:
        raise _too_large(limit)
    parts: list[bytes] = []
    size = 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > limit:
                raise _too_large(limit)
            parts.append(part)
    except ClientDisconnect:
        raise ClientGone from None
    return b"".join(parts)


def _too_large(limit: int) -> ApiError:
    # The rest of the body is still on its way: without this header it would be read to its end.
    return ApiError(
        413,
        f"the body is larger than {limit} bytes",
        code="request_too_large",
        headers={"connection": "close"},
    )
