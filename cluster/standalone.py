"""`baton worker` and `baton router`: one process in the foreground, without Ray.

SIGTERM or SIGINT drains; a second one ends it at once.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Coroutine
from types import FrameType
from typing import TYPE_CHECKING

from cluster.report import SPARSE_S
from cluster.settings import WorkerSettings
from protocol.security import join
from protocol.tls import http_context, renew

if TYPE_CHECKING:
    from router.settings import RouterSettings

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def run_worker(settings: WorkerSettings, drain_s: float) -> int:
    """Exit status 0 when it was asked to stop. Raises StartupError for a problem of its own."""
    import uvloop

    return uvloop.run(_worker(settings, drain_s))


async def _worker(settings: WorkerSettings, drain_s: float) -> int:
    from cluster.worker import Worker

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if stop.is_set():
            os._exit(130)  # the engine ends with its front
        stop.set()

    said = time.monotonic()

    def say(text: str) -> None:
        nonlocal said
        if text.endswith("%") and time.monotonic() - said < SPARSE_S:
            return
        said = time.monotonic()
        print(text if text.startswith(settings.role) else f"{settings.role}: {text}", flush=True)

    worker = Worker(settings, say)
    for number in _SIGNALS:
        loop.add_signal_handler(number, on_signal)
    if not await _until(stop, worker.start()):
        await worker.stop()
        return 130
    left_s = 0.0
    try:
        if not await _until(stop, worker.serve_forever()):
            print(f"{settings.role}: draining; a second signal stops it at once", flush=True)
            left_s = drain_s
    finally:
        await worker.stop(left_s)
    return 0


async def _until(stop: asyncio.Event, work: Coroutine[None, None, None]) -> bool:
    """Runs ``work`` until it ends (True) or until ``stop`` is set (False: it is cancelled)."""
    task = asyncio.ensure_future(work)
    stopped = asyncio.ensure_future(stop.wait())
    await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if task.done():
        task.result()
        return True
    task.cancel()
    await asyncio.wait({task})
    return False


def run_router(settings: RouterSettings, host: str, port: int, drain_s: float) -> int:
    """Serves until a signal. uvicorn drains on the first one and ends at the second."""
    import uvicorn

    from router.app import create_app
    from router.heap import settle
    from router.limits_connection import guarded

    tls = settings.http_tls
    context = None if tls is None else http_context(tls)

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            settle()

        async def on_tick(self, counter: int) -> bool:
            if tls is not None and context is not None and counter % 100 == 0:  # each 10 s
                renew(context, tls)
            return await super().on_tick(counter)

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            self.force_exit = self.should_exit  # uvicorn asks for SIGINT to stop at once
            self.should_exit = True

    settings.check_host(host)
    for number in _SIGNALS:  # uvicorn raises them again when it is done: by then, no matter
        signal.signal(number, lambda *_: None)

    config = uvicorn.Config(
        create_app(settings),
        host=host,
        port=port,
        loop="uvloop",
        http=guarded(settings.body_timeout_s),
        ws="none",
        server_header=False,
        access_log=False,
        log_level="warning",
        timeout_graceful_shutdown=max(1, round(drain_s)),
        timeout_keep_alive=75,  # longer than clients keep idle connections for: they close first
    )
    if context is not None:
        config.ssl_context_factory = lambda *_: context
    server = Server(config)
    print(f"router: {'http' if tls is None else 'https'}://{join(host, port)}", flush=True)
    server.run()
    return 0 if server.started else 1
