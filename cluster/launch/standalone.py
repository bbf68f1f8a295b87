"""`baton worker` and `baton autoscale`: runs one process in the foreground, without Ray.

SIGTERM or SIGINT drains the process; a second signal ends it at once.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Coroutine

from cluster.local.start_report import SPARSE_S
from cluster.settings.autoscaler_settings import AutoscalerSettings
from cluster.settings.worker_settings import WorkerSettings
from protocol.descriptor_limit import raise_descriptor_limit

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def run_worker(settings: WorkerSettings, drain_s: float) -> int:
    """Run until a signal; return the exit status. Raises StartupError for the worker's problem."""
    import uvloop

    raise_descriptor_limit()
    return uvloop.run(_worker(settings, drain_s))


async def _worker(settings: WorkerSettings, drain_s: float) -> int:
    from cluster.worker.worker import Worker

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if stop.is_set():
            os._exit(130)  # the engine ends with its front
        stop.set()

    printed_at = time.monotonic()

    def say(text: str) -> None:
        nonlocal printed_at
        if text.endswith("%") and time.monotonic() - printed_at < SPARSE_S:
            return
        printed_at = time.monotonic()
        print(text if text.startswith(settings.role) else f"{settings.role}: {text}", flush=True)

    worker = Worker(settings, say)
    for number in _SIGNALS:
        loop.add_signal_handler(number, on_signal)
    if not await _run_until(stop, worker.start()):
        await worker.stop()
        return 130
    drain_left_s = 0.0
    try:
        if not await _run_until(stop, worker.serve_forever()):
            print(f"{settings.role}: draining; a second signal stops it at once", flush=True)
            drain_left_s = drain_s
    finally:
        await worker.stop(drain_left_s)
    return 0


def run_autoscaler(settings: AutoscalerSettings) -> int:
    """Run until a signal; return exit status 0. Raises StartupError for the loop's problem."""
    raise_descriptor_limit()
    return asyncio.run(_autoscaler(settings))


async def _autoscaler(settings: AutoscalerSettings) -> int:
    from cluster.autoscale.process import AutoscalerService
    from cluster.autoscale.replica_counts import FixedReplicas

    stop = asyncio.Event()
    for number in _SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, stop.set)

    def say(text: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)

    scaler = AutoscalerService(settings, FixedReplicas(), say)
    await scaler.start()
    began = f"autoscaler {scaler.instance[:8]}: {settings.mode}; decisions in {scaler.log_path}"
    print(began, flush=True)
    try:
        await _run_until(stop, scaler.serve_forever())
    finally:
        await scaler.stop()
    return 0


async def _run_until(stop: asyncio.Event, work: Coroutine[None, None, None]) -> bool:
    """Run ``work``; return True when it ends, False when ``stop`` is set and it is cancelled."""
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
