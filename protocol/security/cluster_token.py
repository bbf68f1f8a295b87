"""The cluster token on every RPC between Baton's processes.

The token is drawn once per cluster and handed to its processes through their environment; a caller
without it is refused before a handler runs. It authenticates; it does not encrypt: beyond loopback
there must be TLS as well (``check_bind``, ``check_http_bind``).
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import grpc

from protocol.errors import StartupError

_KEY = "x-baton-token"

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


def metadata(token: str) -> tuple[tuple[str, str], ...]:
    """gRPC metadata that carries the token."""
    return ((_KEY, token),)


def _holds(details: grpc.HandlerCallDetails, token: str) -> bool:
    for key, value in details.invocation_metadata or ():
        if key == _KEY:
            given = value if isinstance(value, bytes) else value.encode()
            return hmac.compare_digest(given, token.encode())
    return False


def _refusal(handler: Handler | None, refuse: Any) -> Handler | None:
    """A handler of the same shape as ``handler`` that only refuses."""
    if handler is None:
        return None
    if handler.request_streaming and handler.response_streaming:
        return grpc.stream_stream_rpc_method_handler(refuse)
    if handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler(refuse)
    if handler.request_streaming:
        return grpc.stream_unary_rpc_method_handler(refuse)
    return grpc.unary_unary_rpc_method_handler(refuse)


class AsyncTokenGuard(grpc.aio.ServerInterceptor):
    """Refuses calls without the cluster token, on an asyncio server."""

    def __init__(self, token: str) -> None:
        self._token = token

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        handler = await continuation(details)
        if _holds(details, self._token):
            return handler

        async def refuse(_request: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "missing or wrong cluster token")

        return _refusal(handler, refuse)


class TokenGuard(grpc.ServerInterceptor):
    """Refuses calls without the cluster token, on a threaded server."""

    def __init__(self, token: str) -> None:
        self._token = token

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Handler | None],
        details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        handler = continuation(details)
        if _holds(details, self._token):
            return handler

        def refuse(_request: object, context: grpc.ServicerContext) -> None:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "missing or wrong cluster token")

        return _refusal(handler, refuse)


def is_loopback(host: str) -> bool:
    """Whether what listens on ``host`` is reached from this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_bind(host: str, *, tls: bool = False) -> None:
    """Raises StartupError for a host that a worker may not listen on. Whoever listens has the
    cluster's token already; beyond loopback TLS must be there, too."""
    if is_loopback(host):
        return
    if not tls:
        raise StartupError(
            f"refusing to listen on {host!r}: beyond loopback workers need TLS. Missing: the files"
            " ca, cert and key (`baton certs init DIR --host NAME` makes them). Without them:"
            " 127.0.0.1, ::1 or localhost"
        )
    if not host or _is_wildcard(host):
        raise StartupError(
            f"a worker cannot listen on {host!r}: its host is the name or address by which the"
            " others reach it"
        )


def check_http_bind(host: str, *, api_keys: bool, tls: bool, allow_plain_http: bool) -> None:
    """Raises StartupError for a host that a router may not listen on, and says what is missing."""
    if is_loopback(host):
        return
    missing = []
    if not api_keys:
        missing.append("a file of API keys (--api-keys; `baton keys new TENANT` draws a key)")
    if not (tls or allow_plain_http):
        missing.append(
            "a certificate for HTTPS (http_tls: cert and key), or allow_plain_http where a proxy"
            " in front speaks TLS"
        )
    if missing:
        raise StartupError(
            f"refusing to listen on {host!r}: beyond loopback a router needs API keys and TLS."
            f" Missing: {'; '.join(missing)}. Without them: 127.0.0.1, ::1 or localhost"
        )


def _is_wildcard(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False
