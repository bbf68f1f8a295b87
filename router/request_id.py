"""An ``x-request-id`` header on every response: the client's own, where it sent a sane one."""

from __future__ import annotations

import re
import secrets

from starlette.types import ASGIApp, Message, Receive, Scope, Send

SANE = "^[A-Za-z0-9._:-]{1,128}$"
"""What an id must be like to come back, as a regular expression for lines without an end."""

_SANE = re.compile(SANE[:-1].encode() + rb"\Z")


class RequestIdMiddleware:
    """Plain ASGI: a wrapper with queues and tasks would cost every chunk of every stream."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"x-request-id", b"")
        request_id = given if _SANE.match(given) else secrets.token_hex(16).encode()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id)]
            await send(message)

        await self._app(scope, receive, send_with_id)
