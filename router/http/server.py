"""A router's HTTP server: uvicorn, with the limits on connections, and certificates that follow
their files.

`baton router` runs ``Server`` in the foreground; a Serve replica has a ``HostedRouter`` in its own
event loop. Several of those may share an address: the kernel deals connections out among them
(SO_REUSEPORT), so that one can come before another goes.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import socket
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvicorn
from msgspec.structs import replace

from protocol.endpoints.grpc_endpoints import join
from protocol.errors import StartupError
from protocol.security.tls import http_context, renew
from router.http.app import create_app
from router.http.limits import FIRST_S, guarded
from router.settings import RouterSettings

if TYPE_CHECKING:
    from fastapi import FastAPI


# MERGED router.heap
# What a router has loaded by the time it serves is left alone by the garbage collector.
#
# Most of it lives as long as the process: code, schemas, a vocabulary. A full collection would go
# through it again and again while a large body is decoded, and streams wait meanwhile.


def settle() -> None:
    """Of a process that is a router and nothing else; to be called when all is loaded."""
    gc.collect()
    gc.freeze()


_BACKLOG = 2048
_TICKS_10_S = 100  # uvicorn's are 0.1 s
_ATTACHED_S = 5.0  # for a decode worker, before clients are let in
_POLL_S = 0.05


class Server(uvicorn.Server):
    """Serves ``app`` until it is told to stop; then answers what it has, for ``drain_s``."""

    def __init__(
        self, app: FastAPI, settings: RouterSettings, drain_s: float, **options: Any
    ) -> None:
        tls = settings.http_tls
        config = uvicorn.Config(
            app,
            loop="uvloop",
            http=guarded(settings.body_timeout_s),
            ws="none",
            server_header=False,
            access_log=False,
            log_level="warning",
            timeout_graceful_shutdown=max(1, round(drain_s)),
            timeout_keep_alive=75,  # longer than clients keep idle ones: they close first
            **options,
        )
        super().__init__(config)
        self._files = tls
        self._context = context = None if tls is None else http_context(tls)
        if context is not None:
            config.ssl_context_factory = lambda *_: context

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        settle()

    async def on_tick(self, counter: int) -> bool:
        if self._files is not None and self._context is not None and counter % _TICKS_10_S == 0:
            renew(self._context, self._files)
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """To close is to reset what the kernel has accepted and nobody has taken: that is taken
        first, and answered, too."""
        loop = asyncio.get_running_loop()
        taken = [client for each in sockets or [] for client in _taken(each)]
        for server in self.servers:
            server.close()
        context = self.config.ssl
        joining = [
            loop.create_task(loop.connect_accepted_socket(self._connection, client, ssl=context))
            for client in taken
        ]
        if joining:
            loop.call_later(FIRST_S, self._close_idle)
        await super().shutdown(sockets)
        for task in joining:
            task.cancel()

    def _connection(self) -> asyncio.Protocol:
        make: Any = self.config.http_protocol_class
        made: asyncio.Protocol = make(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return made

    def _close_idle(self) -> None:
        for connection in list(self.server_state.connections):
            connection.shutdown()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit = self.should_exit  # uvicorn asks for SIGINT to stop at once
        self.should_exit = True


def run_router(settings: RouterSettings, host: str, port: int, drain_s: float) -> int:
    """Serves until a signal, drains on the first one and ends at the second."""
    settings.check_host(host)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)  # uvicorn raises them again when it is done
    settings = replace(settings, url=settings.url_at(host, port))
    server = Server(create_app(settings), settings, drain_s)
    sockets = listening(host, port, shared=False)
    print(f"router: {settings.url}", flush=True)
    server.run(sockets)
    return 0 if server.started else 1


class HostedRouter:
    """The same within an event loop that is there. start -> serving -> stop"""

    def __init__(self, settings: RouterSettings, host: str, port: int, drain_s: float) -> None:
        settings.check_host(host)
        self._address = (host, port)
        settings = replace(settings, url=settings.url_at(host, port))
        self._app = create_app(settings)
        # Its lifespan is ours to run: uvicorn would keep the reason of a failure to itself.
        # Nor may it configure logging, which closes Serve's handlers: a controller that comes back
        # asks a replica for the file of its log, and ends one that has none (ray 2.60.0).
        self._server = Server(self._app, settings, drain_s, lifespan="off", log_config=None)
        self._ready = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Returns when it listens; raises StartupError, or what kept the application from it."""
        self._task = asyncio.create_task(self._serve(), name="http server")
        ready = asyncio.create_task(self._ready.wait())
        await asyncio.wait({self._task, ready}, return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        if self._task.done():
            self._task.result()
            raise StartupError("the HTTP server ended at its start")

    async def _serve(self) -> None:
        async with self._app.router.lifespan_context(self._app):
            # Another one may be serving at this address: it had better take what comes until then.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_ATTACHED_S):
                    await self._attached()
            sockets = listening(*self._address)
            self._ready.set()
            await self._server.serve(sockets)  # which closes them

    async def _attached(self) -> None:
        while not self._app.state.router.pool.attached:
            await asyncio.sleep(_POLL_S)

    def problem(self) -> str | None:
        """Why it does not serve any more, if so."""
        if self._task is None or not self._task.done():
            return None
        error = None if self._task.cancelled() else self._task.exception()
        return f"the HTTP server has ended: {error}"

    async def stop(self) -> None:
        """Takes nothing new; returns when all is answered, or its time is over."""
        if self._task is None:
            return
        self._server.should_exit = True
        await asyncio.wait({self._task})


def _taken(listener: socket.socket) -> Iterator[socket.socket]:
    """Connections that wait to be accepted."""
    with contextlib.suppress(OSError):  # until there are none
        while True:
            client, _ = listener.accept()
            client.setblocking(False)
            yield client


def listening(host: str, port: int, *, shared: bool = True) -> list[socket.socket]:
    """Sockets at every address of ``host``, that others of this user may share. Raises
    StartupError."""
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
        raise StartupError(f"cannot listen on {join(host, port)}: {reason}") from error
    return sockets
