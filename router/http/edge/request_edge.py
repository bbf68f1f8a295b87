"""``RequestEdge``: the outermost ASGI middleware of ``create_app``.

It gives each request its id, adds the headers of CORS, answers for an application that fails, and
has the request recorded. It wraps ``send`` once for all of that: each wrapper costs every chunk of
a stream a coroutine.
"""

from __future__ import annotations

import re
import secrets

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.common.errors import WriteError, router_failed, write_openai_error
from router.http.edge.cors import CorsPolicy
from router.observation.observer import RequestObserver
from router.observation.request_record import RequestRecord

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}\Z")
_ANTHROPIC = b"anthropic-version"
"""Header of requests whose clients read the id of the response from ``request-id``."""


class RequestEdge:
    """Adds ``x-request-id`` to every response: the client's own id, if it is valid.

    Fields of ``scope["state"]``: ``request_id``; ``own_request_id``: whether this router made it,
    so that it is unique; ``record``: a RequestRecord, where requests are recorded; ``send_body``:
    the server's own ``send``, for body messages after the head. ``write`` returns the response for
    an error. Plain ASGI, because Starlette's wrapper has a queue and a
    task that cost every chunk.
    """

    def __init__(
        self,
        app: ASGIApp,
        cors: CorsPolicy | None = None,
        write: WriteError = write_openai_error,
    ) -> None:
        self._app = app
        self._cors = cors
        self._write = write

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"")
        is_given = _REQUEST_ID.match(given) is not None
        request_id = given if is_given else secrets.token_hex(16).encode()
        added = [(b"x-request-id", request_id)]
        if _ANTHROPIC in headers:
            added.append((b"request-id", request_id))
        observer = _observer(scope)
        record = None if observer is None else observer.begin(scope, request_id.decode())
        state = scope.setdefault("state", {})
        state |= {
            "request_id": request_id.decode(),
            "own_request_id": not is_given,
            "record": record,
            "send_body": send,
        }
        has_started = False

        async def send_with_headers(message: Message) -> None:
            nonlocal has_started
            if message["type"] == "http.response.start":
                has_started = True
                message["headers"] = [*message.get("headers", ()), *added]
                _record_status(record, message)
            await send(message)

        try:
            preflight = None if self._cors is None else self._cors.preflight_headers(scope)
            if preflight is not None:
                await _send_preflight(send_with_headers, preflight)
                return
            if self._cors is not None:
                added += self._cors.response_headers(scope)
            await self._app(scope, receive, send_with_headers)
        except Exception:
            if not has_started:  # Starlette's own response would have none of the headers
                response = self._write(scope, router_failed())
                await response(scope, receive, send_with_headers)
            raise  # to be logged
        finally:
            if observer is not None and record is not None:
                observer.end(record, scope)


def _observer(scope: Scope) -> RequestObserver | None:
    router = getattr(scope["app"].state, "router", None)
    return None if router is None else router.observer


def _record_status(record: RequestRecord | None, message: Message) -> None:
    if record is not None:
        record.status = message["status"]


async def _send_preflight(send: Send, headers: list[tuple[bytes, bytes]]) -> None:
    await send({"type": "http.response.start", "status": 204, "headers": headers})
    await send({"type": "http.response.body", "body": b"", "more_body": False})
