"""``RequestEdge``: the outermost ASGI middleware of ``create_app``.

It gives each request its id, adds the headers of CORS, and has the request recorded. It wraps
``send`` once for all of that: each wrapper costs every chunk of a stream a coroutine.
"""

from __future__ import annotations

import re
import secrets

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.http.edge.cors import CorsPolicy
from router.observation.observer import RequestObserver
from router.observation.request_record import RequestRecord

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}\Z")


class RequestEdge:
    """Adds ``x-request-id`` to every response: the client's own id, if it is valid.

    Fields of ``scope["state"]``: ``request_id``; ``own_request_id``: whether this router made it,
    so that it is unique; ``record``: a RequestRecord, where requests are recorded. Plain ASGI,
    because Starlette's wrapper has a queue and a task that cost every chunk.
    """

    def __init__(self, app: ASGIApp, cors: CorsPolicy | None = None) -> None:
        self._app = app
        self._cors = cors

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"x-request-id", b"")
        is_given = _REQUEST_ID.match(given) is not None
        request_id = given if is_given else secrets.token_hex(16).encode()
        state = scope.setdefault("state", {})
        state["request_id"], state["own_request_id"] = request_id.decode(), not is_given
        added = [(b"x-request-id", request_id)]
        if self._cors is not None:
            preflight = self._cors.preflight_headers(scope)
            if preflight is not None:
                await _send_preflight(send, [*preflight, *added])
                return
            added += self._cors.response_headers(scope)
        observer = _observer(scope)
        record = None if observer is None else observer.begin(scope, state["request_id"])
        state["record"] = record

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *added]
                _record_status(record, message)
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            if observer is not None and record is not None:
                observer.end(record)


def _observer(scope: Scope) -> RequestObserver | None:
    router = getattr(scope["app"].state, "router", None)
    return None if router is None else router.observer


def _record_status(record: RequestRecord | None, message: Message) -> None:
    if record is not None:
        record.status = message["status"]


async def _send_preflight(send: Send, headers: list[tuple[bytes, bytes]]) -> None:
    await send({"type": "http.response.start", "status": 204, "headers": headers})
    await send({"type": "http.response.body", "body": b"", "more_body": False})
