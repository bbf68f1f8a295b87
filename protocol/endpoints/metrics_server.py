"""The Prometheus page of a process: ``GET /metrics`` on a port of its own.

The page is rendered for each scrape. Every connection is closed after CONNECTION_S, so that clients
that neither send nor read cannot pile up. On loopback the page is open to programs of this machine,
which excludes the scripts of web pages (``AllowedHosts``); on other hosts clients need a
certificate of the cluster. Renewed files, also of the CA, are used from the next connection on.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable
from typing import Self

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from protocol.endpoints.grpc_endpoints import join_host_port
from protocol.errors import StartupError
from protocol.security.host_header import AllowedHosts
from protocol.security.listen_hosts import check_worker_host, is_loopback
from protocol.security.tls import TlsFiles, TlsIdentity, mutual_tls_server_context

log = logging.getLogger("baton.tls")

CONNECTION_S = 10.0


class MetricsServer:
    """Serves the page that ``page`` returns; it is called on the event loop for each scrape. Each
    process creates one: start -> scrapes -> close."""

    def __init__(self, page: Callable[[], bytes]) -> None:
        self._page = page
        self._web = web.Server(self._answer)
        self._server: asyncio.Server | None = None
        self._hosts: AllowedHosts | None = None  # None: clients have certificates

    async def start(self, host: str, port: int, files: TlsFiles | None = None) -> str:
        """Listen and return host:port; port 0 is any free one. Raises StartupError."""
        check_worker_host(host, tls=files is not None)
        context = None if files is None or is_loopback(host) else _RenewingContext(files)
        self._hosts = AllowedHosts() if context is None else None
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(self._connection, host, port, ssl=context)
        except OSError as error:
            where = join_host_port(host, port)
            raise StartupError(f"cannot serve metrics on {where}: {error.strerror}") from error
        return join_host_port(host, self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Stop listening. Idempotent."""
        if self._server is not None:
            self._server.close()
            await self._web.shutdown(timeout=1.0)
            self._server = None

    def _connection(self) -> asyncio.Protocol:
        connection = self._web()
        asyncio.get_running_loop().call_later(CONNECTION_S, _abort, connection)
        return connection

    async def _answer(self, request: web.BaseRequest) -> web.Response:
        hosts = request.headers.getall("Host", [])
        if self._hosts is not None and not all(map(self._hosts.permit, hosts)):
            response = web.Response(status=421, text="reach it as localhost or by an address\n")
        elif request.method not in ("GET", "HEAD"):
            response = web.Response(status=405, text="GET it\n", headers={"Allow": "GET, HEAD"})
        elif request.path != "/metrics":
            response = web.Response(status=404, text="only /metrics is here\n")
        else:
            headers = {"Content-Type": CONTENT_TYPE_LATEST, "Cache-Control": "no-store"}
            response = web.Response(body=self._page(), headers=headers)
        response.force_close()
        return response


def _abort(connection: web.RequestHandler) -> None:
    if connection.transport is not None:
        connection.transport.abort()


class _RenewingContext(ssl.SSLContext):
    """A context that gives each connection the present content of the TLS files.

    An SSLContext cannot unload a CA, and resumes the sessions of clients it has accepted before. So
    a renewal creates another context, and this one only passes connections on to it."""

    def __new__(cls, files: TlsFiles) -> Self:
        return super().__new__(cls, ssl.PROTOCOL_TLS_SERVER)

    def __init__(self, files: TlsFiles) -> None:
        """Raise StartupError for files that cannot be used."""
        self._files, self._identity = files, TlsIdentity(files)
        self._used = self._identity.version
        self._context = mutual_tls_server_context(files)

    def wrap_bio(
        self,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
        server_side: bool = False,
        server_hostname: str | bytes | None = None,
        session: ssl.SSLSession | None = None,
    ) -> ssl.SSLObject:
        """Start a TLS connection; asyncio and uvloop call this before each handshake."""
        self._renew()
        return self._context.wrap_bio(incoming, outgoing, server_side, server_hostname, session)

    def _renew(self) -> None:
        if (version := self._identity.version) == self._used:
            return
        try:
            self._context = mutual_tls_server_context(self._files)
        except StartupError as error:  # half replaced; the next connection tries again
            log.warning("the metrics port keeps using the last TLS files: %s", error)
            return
        self._used = version
