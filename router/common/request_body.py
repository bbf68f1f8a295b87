"""``read_json_object``: reads a request's JSON body within limits of size, time and complexity.

Called by ``accept_request``. Of a name that occurs twice in an object the last one counts, as in
Python's own parser.
"""

from __future__ import annotations

import asyncio
import re
from itertools import islice
from typing import Any

import msgspec
from fastapi import Request
from starlette.requests import ClientDisconnect

from router.common.body_budget import BodyClaim
from router.common.errors import ApiError, invalid

MAX_ITEMS = 1 << 18
"""Strings, names, arrays and objects in one body. Each takes memory, and containers take time of
the garbage collector: 8 MiB of ``[],[],...`` would block the event loop for seconds. Numbers are
cheap, and a prompt may have a million of them."""

_MARKS = (b'"', b"[", b"{", b":")
_ITEM = re.compile(rb'"[^"]*"?|[\[{:]')
"""A string, or the beginning of an array, an object or a member, in text without escapes."""


def too_many_items(data: bytes) -> bool:
    """Return whether ``data`` has more than ``MAX_ITEMS`` strings, arrays, objects and members.

    It runs before the text is decoded, takes at most some 60 ms for 8 MiB, and returns either value
    for text that is not JSON.
    """
    if sum(map(data.count, _MARKS)) <= MAX_ITEMS:  # most bodies: an upper bound of the items
        return False
    if b"\\" in data:
        data = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    return next(islice(_ITEM.finditer(data), MAX_ITEMS, None), None) is not None


_DISCARD_FACTOR = 8
"""A body is read and discarded up to this factor of the limit: a client that is cut off while it
sends hardly ever sees the response."""

_HALF_OF_A_PAIR = re.compile(rb"\\u[dD][89a-fA-F]")
_CLOSE = {"connection": "close"}
_LONG_BODY = 64 << 10  # bytes, which take some 0.4 ms to decode


class ClientDisconnected(Exception):
    """The client has closed the connection, so that no response can be sent."""


async def read_json_object(
    request: Request, limit: int, timeout_s: float, claim: BodyClaim
) -> dict[str, Any]:
    """Return the JSON object in the body, of at most ``limit`` bytes within ``timeout_s``.

    ``claim`` counts the bytes as they come; the caller ends it. Raises ApiError or
    ClientDisconnected.
    """
    _check_type(request)
    data = await _read(request, limit, timeout_s, claim)
    if too_many_items(data):
        what = f"at most {MAX_ITEMS} strings, names, arrays and objects together"
        raise invalid(f"the body contains too much: {what} are accepted", code="body_too_complex")
    try:
        value = msgspec.json.decode(data)
    except RecursionError:
        raise invalid("the body is nested too deeply", code="invalid_json") from None
    except ValueError as error:  # msgspec.DecodeError and UnicodeDecodeError
        raise invalid(_not_json(data, error), code="invalid_json") from None
    if len(data) > _LONG_BODY:  # its checks take as long again
        await asyncio.sleep(0)
    if not isinstance(value, dict):
        raise invalid(
            f"the body must be a JSON object, not {_json_type(value)}", code="invalid_json"
        )
    return value


def _not_json(data: bytes, error: ValueError) -> str:
    if not data:
        return "the body is empty; expected a JSON object"
    if isinstance(error, UnicodeDecodeError):
        return f"the body is not valid JSON: a string in it is not UTF-8 ({error.reason})"
    hint = " (does it contain half of a surrogate pair?)" if _HALF_OF_A_PAIR.search(data) else ""
    what = str(error).removeprefix("JSON is malformed: ").removesuffix(" - at `$[...]`")
    what = "it ends too early" if what == "Input data was truncated" else what
    return f"the body is not valid JSON: {what}{hint}"


def _json_type(value: object) -> str:
    kinds = {bool: "a boolean", int: "a number", float: "a number", str: "a string"}
    return {**kinds, list: "an array", type(None): "null"}[type(value)]


def _check_type(request: Request) -> None:
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise _unsupported(
            f"content-encoding {encoding[:80]!r} is not supported: send it without an encoding"
        )
    given = request.headers.get("content-type")
    if given is None:  # any web page can make a browser send such a request
        raise _unsupported("expected content-type application/json, but there is none")
    kind, *parameters = (part.strip().lower() for part in given.split(";"))
    if kind != "application/json":
        raise _unsupported(f"expected content-type application/json, got {given[:80]!r}")
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        if name.strip() == "charset" and value.strip(' "') not in ("utf-8", "utf8"):
            raise _unsupported(f"the charset of JSON must be utf-8, got {given[:80]!r}")


def announced_bytes(request: Request) -> int | None:
    """Return the length of the body as the client has announced it; None where it has not."""
    announced = request.headers.get("content-length", "")
    return int(announced[:20]) if announced.isdecimal() else None


async def _read(request: Request, limit: int, timeout_s: float, claim: BodyClaim) -> bytes:
    too_long = (announced_bytes(request) or 0) > limit
    if too_long and "expect" in request.headers:
        raise _too_large(limit)  # the body has not been sent yet
    try:
        async with asyncio.timeout(timeout_s):
            return await _collect(request, limit, claim)
    except ClientDisconnect:
        raise ClientDisconnected from None
    except TimeoutError:
        if too_long:
            raise _too_large(limit) from None
        message = f"the body was not received within {timeout_s:g} s"
        raise ApiError(408, message, code="request_timeout", headers=_CLOSE) from None


async def _collect(request: Request, limit: int, claim: BodyClaim) -> bytes:
    parts: list[bytes] = []
    refusal: ApiError | None = None
    size = 0
    async for part in request.stream():
        size += len(part)
        if size <= limit and refusal is None:
            try:
                claim.grow(size)
                parts.append(part)
                continue
            except ApiError as error:
                refusal = error
                refusal.headers.update(_CLOSE)
        parts.clear()
        claim.release()
        if size > _DISCARD_FACTOR * limit:
            break
    if size > limit:
        raise _too_large(limit)
    if refusal is not None:
        raise refusal
    return b"".join(parts)


def _unsupported(message: str) -> ApiError:
    return ApiError(415, message, code="unsupported_media_type")


def _too_large(limit: int) -> ApiError:
    # Without this header the rest of the body would be read to its end.
    message = f"the body is too large: at most {limit} bytes are accepted"
    return ApiError(413, message, code="request_too_large", headers=_CLOSE)
