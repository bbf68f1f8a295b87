"""A process's own Prometheus page: ``GET /metrics`` on a port of its own. One registry a process.

The page is made anew for each scrape. Connections are short: whoever sends nothing, or reads
nothing, is cut after LIFE_S. On loopback it is open; beyond, only holders of a certificate of the
cluster may read it; renewed files, the CA's too, are used from the next connection on.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable
from typing import Self

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from protocol.endpoints.grpc_endpoints import join
from protocol.errors import StartupError
from protocol.security.cluster_token import check_bind, is_loopback
from protocol.security.tls import Identity, TlsFiles, mutual_context

log = logging.getLogger("baton.tls")

LIFE_S = 10.0


class MetricsServer:
    """start -> scrapes -> close. ``page`` is called on the event loop for each scrape."""

    def __init__(self, page: Callable[[], bytes]) -> None:
        self._page = page
        self._web = web.Server(self._answer)
        self._server: asyncio.Server | None = None

    async def start(self, host: str, port: int, files: TlsFiles | None = None) -> str:
        """Listen; returns host:port. Port 0: any free one. Raises StartupError where it cannot."""
        check_bind(host, tls=files is not None)
        context = None if files is None or is_loopback(host) else _Renewing(files)
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(self._connection, host, port, ssl=context)
        except OSError as error:
            where = join(host, port)
            raise StartupError(f"cannot serve metrics on {where}: {error.strerror}") from error
        return join(host, self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Idempotent."""
        if self._server is not None:
            self._server.close()
            await self._web.shutdown(timeout=1.0)
            self._server = None

    def _connection(self) -> asyncio.Protocol:
        connection = self._web()
        asyncio.get_running_loop().call_later(LIFE_S, _cut, connection)
        return connection

    async def _answer(self, request: web.BaseRequest) -> web.Response:
        if request.method not in ("GET", "HEAD"):
            response = web.Response(status=405, text="GET it\n", headers={"Allow": "GET, HEAD"})
        elif request.path != "/metrics":
            response = web.Response(status=404, text="only /metrics is here\n")
        else:
            headers = {"Content-Type": CONTENT_TYPE_LATEST, "Cache-Control": "no-store"}
            response = web.Response(body=self._page(), headers=headers)
        response.force_close()
        return response


def _cut(connection: web.RequestHandler) -> None:
    if connection.transport is not None:
        connection.transport.abort()


class _Renewing(ssl.SSLContext):
    """Each connection gets a context of what the files hold as it comes.

    A context cannot forget a CA once it has loaded it, and resumes sessions of whom it has let in
    before; so a renewal makes another one, and this only passes connections on to it."""

    def __new__(cls, files: TlsFiles) -> Self:
        return super().__new__(cls, ssl.PROTOCOL_TLS_SERVER)

    def __init__(self, files: TlsFiles) -> None:
        """Raises StartupError for files that cannot be used."""
        self._files, self._identity = files, Identity(files)
        self._used = self._identity.version
        self._context = mutual_context(files)

    def wrap_bio(
        self,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
        server_side: bool = False,
        server_hostname: str | bytes | None = None,
        session: ssl.SSLSession | None = None,
    ) -> ssl.SSLObject:
        """What asyncio and uvloop ask for before each handshake."""
        self._renew()
        return self._context.wrap_bio(incoming, outgoing, server_side, server_hostname, session)

    def _renew(self) -> None:
        if (version := self._identity.version) == self._used:
            return
        try:
            self._context = mutual_context(self._files)
        except StartupError as error:  # replaced once more, and half so far: the next one sees
            log.warning("metrics go on with the last TLS files: %s", error)
            return
        self._used = version
