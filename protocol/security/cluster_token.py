"""The cluster token, which every RPC between processes of a cluster carries.

The token is drawn once per cluster, and processes get it through their environment. A call without
it is refused before its handler runs. The token authenticates and does not encrypt, so beyond
loopback there must be TLS as well (see ``listen_hosts``).
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import grpc

_KEY = "x-baton-token"

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


def token_metadata(token: str) -> tuple[tuple[str, str], ...]:
    """Return the gRPC metadata that carries the token."""
    return ((_KEY, token),)


def _has_token(details: grpc.HandlerCallDetails, token: str) -> bool:
    for key, value in details.invocation_metadata or ():
        if key == _KEY:
            given = value if isinstance(value, bytes) else value.encode()
            return hmac.compare_digest(given, token.encode())
    return False


def _refusing_handler(handler: Handler | None, refuse: Any) -> Handler | None:
    """Return a handler of the same RPC kind as ``handler`` that only calls ``refuse``."""
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
    """Refuses calls without the cluster token on an asyncio server."""

    def __init__(self, token: str) -> None:
        self._token = token

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        handler = await continuation(details)
        if _has_token(details, self._token):
            return handler

        async def refuse(_request: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "missing or wrong cluster token")

        return _refusing_handler(handler, refuse)


class TokenGuard(grpc.ServerInterceptor):
    """Refuses calls without the cluster token on a threaded server."""

    def __init__(self, token: str) -> None:
        self._token = token

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Handler | None],
        details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        handler = continuation(details)
        if _has_token(details, self._token):
            return handler

        def refuse(_request: object, context: grpc.ServicerContext) -> None:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "missing or wrong cluster token")

        return _refusing_handler(handler, refuse)
