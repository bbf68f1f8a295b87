"""A router's HTTP server: uvicorn with limits on connections and renewed certificates.

``baton router`` calls ``run_router``; a Ray Serve replica has a ``HostedRouter`` in its own event
loop. Several of those may share an address: the kernel distributes connections among them
(SO_REUSEPORT), so that a new one can start before an old one stops.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import math
import os
import signal
import socket
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvicorn
from msgspec.structs import replace

from protocol.descriptor_limit import connections_within, raise_descriptor_limit
from protocol.endpoints.grpc_endpoints import join_host_port
from protocol.errors import StartupError
from protocol.security.tls import https_server_context, reload_certificate
from router.connections.acceptor import Acceptor
from router.connections.connection_metrics import ConnectionMetrics
from router.connections.connection_table import (
    ConnectionSlot,
    ConnectionTable,
    connection_limits,
)
from router.http.app import create_app
from router.http.limits import FIRST_REQUEST_S, LimitedHttpProtocol, limited_protocol
from router.settings import RouterSettings

if TYPE_CHECKING:
    from fastapi import FastAPI

log = logging.getLogger(__name__)


_GC_THRESHOLDS = (20_000, 20, 20)
"""Objects more than before at which the youngest are looked at (1 ms), and so on."""


def freeze_gc() -> None:
    """Exclude everything loaded so far from garbage collection.

    Code, schemas and the vocabulary live as long as the process. A full collection would visit
    them again and again while a large body is decoded, and streams would wait meanwhile. Nearly
    all objects of a request end by their reference counts, so collections can also be rare: by
    Python's own thresholds they take a twentieth of the time of a busy router.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)


_BACKLOG = 2048
_TICKS_10_S = 100  # a tick of uvicorn is 0.1 s
_ATTACH_S = 5.0  # time limit for a decode worker before clients are accepted
_POLL_S = 0.05


class RouterServer(uvicorn.Server):
    """Serves ``app`` until it is stopped; then finishes its requests for up to ``drain_s``."""

    def __init__(
        self, app: FastAPI, settings: RouterSettings, drain_s: float, **options: Any
    ) -> None:
        tls = settings.http_tls
        config = uvicorn.Config(
            app,
            loop="uvloop",
            http=limited_protocol(settings.body_timeout_s),
            ws="none",
            server_header=False,
            access_log=False,
            log_level="warning",
            timeout_graceful_shutdown=max(1, round(drain_s)),
            timeout_keep_alive=math.ceil(settings.idle_timeout_s),
            **options,
        )
        super().__init__(config)
        self._app = app
        self._files = tls
        self._context = None if tls is None else https_server_context(tls)
        self.connections = _connection_table(settings)
        self._acceptors: list[Acceptor] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Run the lifespan, and accept connections from ``sockets``."""
        await super().startup([])  # uvicorn would let the event loop accept: see ``Acceptor``
        state = self._app.state.router
        shown = ConnectionMetrics(self.connections, state.settings.model_id)
        state.metrics.registry.register(shown)
        for listener in sockets or []:
            acceptor = Acceptor(listener, self.connections, self._connection, self._context)
            acceptor.start()
            self._acceptors.append(acceptor)
        freeze_gc()

    async def on_tick(self, counter: int) -> bool:
        if self._files is not None and self._context is not None and counter % _TICKS_10_S == 0:
            reload_certificate(self._context, self._files)
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop listening and finish the open requests.

        Closing a listener resets connections that wait in the kernel's queue, so these are accepted
        and answered first.
        """
        opening = [acceptor.stop() for acceptor in self._acceptors]
        if any(opening):
            loop = asyncio.get_running_loop()
            loop.call_later(FIRST_REQUEST_S, self._close_idle)
        await super().shutdown(sockets)
        for acceptor in self._acceptors:
            acceptor.close()

    def _connection(self, slot: ConnectionSlot) -> asyncio.Protocol:
        make: Any = self.config.http_protocol_class
        made: LimitedHttpProtocol = make(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        made.slot = slot
        return made

    def _close_idle(self) -> None:
        for connection in list(self.server_state.connections):
            connection.shutdown()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit = self.should_exit  # uvicorn itself would need SIGINT for that
        self.should_exit = True


def run_router(settings: RouterSettings, host: str, port: int, drain_s: float) -> int:
    """Serve until a signal; drain on the first one, exit at the second. Return the exit status."""
    settings.check_host(host)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)  # uvicorn raises the signals again at its end
    settings = replace(settings, url=settings.url_at(host, port))
    server = RouterServer(create_app(settings), settings, drain_s)
    sockets = open_listening_sockets(host, port, shared=False)
    print(f"router: {settings.url}", flush=True)
    server.run(sockets)
    return 0 if server.started else 1


class HostedRouter:
    """A router in a running event loop: ``start`` -> serving -> ``stop``. Owned by its caller."""

    def __init__(self, settings: RouterSettings, host: str, port: int, drain_s: float) -> None:
        settings.check_host(host)
        self._address = (host, port)
        settings = replace(settings, url=settings.url_at(host, port))
        self._app = create_app(settings)
        # The lifespan is run here, because uvicorn would not report the reason of a failure.
        # Uvicorn must not configure logging, which closes Serve's handlers: a restarted controller
        # asks each replica for its log file, and ends one that has none (ray 2.60.0).
        self._server = RouterServer(self._app, settings, drain_s, lifespan="off", log_config=None)
        self._ready = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Return when it listens. Raises StartupError, or the error of the application."""
        self._task = asyncio.create_task(self._serve(), name="http server")
        ready = asyncio.create_task(self._ready.wait())
        await asyncio.wait({self._task, ready}, return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        if self._task.done():
            self._task.result()
            raise StartupError("the HTTP server ended at its start")

    async def _serve(self) -> None:
        async with self._app.router.lifespan_context(self._app):
            # Another router may serve this address; let it serve until workers are attached here.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_ATTACH_S):
                    await self._wait_attached()
            sockets = open_listening_sockets(*self._address)
            self._ready.set()
            await self._server.serve(sockets)  # which closes them

    async def _wait_attached(self) -> None:
        while not self._app.state.router.pool.attached:
            await asyncio.sleep(_POLL_S)

    def problem(self) -> str | None:
        """Return why it no longer serves, or None while it does."""
        if self._task is None or not self._task.done():
            return None
        error = None if self._task.cancelled() else self._task.exception()
        return f"the HTTP server has ended: {error}"

    async def stop(self) -> None:
        """Accept nothing new; return when all is answered, or ``drain_s`` is over."""
        if self._task is None:
            return
        self._server.should_exit = True
        await asyncio.wait({self._task})


def _connection_table(settings: RouterSettings) -> ConnectionTable:
    """Return a table for as many connections as the configuration and the process allow."""
    wanted = settings.max_connections
    descriptors = raise_descriptor_limit()
    total = min(wanted, connections_within(descriptors))
    if total < wanted:
        log.warning(
            "limits.max_connections is %d, but this process may open %d files: it accepts %d"
            " connections; raise the limit (ulimit -n, LimitNOFILE=)",
            *(wanted, descriptors, total),
        )
    return ConnectionTable(connection_limits(total, settings.max_connections_per_address))


def open_listening_sockets(host: str, port: int, *, shared: bool = True) -> list[socket.socket]:
    """Return listening sockets at every address of ``host``. Raises StartupError.

    ``shared``: other processes of this user may listen at the same address.
    """
    sockets: list[socket.socket] = []
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, address in dict.fromkeys(found):
            sockets.append(each := socket.socket(family, kind, protocol))
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, shared)
            if family == socket.AF_INET6:
                each.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            each.bind(address)
            each.listen(_BACKLOG)
            each.setblocking(False)
    except OSError as error:
        for each in sockets:
            each.close()
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
        raise StartupError(f"cannot listen on {join_host_port(host, port)}: {reason}") from error
    return sockets
