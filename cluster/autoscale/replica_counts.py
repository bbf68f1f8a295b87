"""Numbers of workers by home pool: reads those that were asked for, and asks for others."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from cluster.sizing.snapshot import WorkerCounts, WorkerSnapshot, staying
from protocol.errors import Unavailable


class ReplicaController(Protocol):
    """Starts and stops workers on request, where ``changes`` is true.

    Methods raise Unavailable: then nothing is known, or it is not known whether anything changed.
    """

    changes: bool

    async def targets(self, workers: Sequence[WorkerSnapshot]) -> WorkerCounts:
        """Return the workers that are asked for now; ``workers``: those that are registered."""
        ...

    async def ask(self, before: WorkerCounts, after: WorkerCounts) -> None:
        """Ask for other numbers; return when the request was accepted, not when the workers
        exist."""
        ...


class FixedReplicas:
    """Without Ray no worker is started or stopped from here: the registered workers are the
    targets."""

    changes = False

    async def targets(self, workers: Sequence[WorkerSnapshot]) -> WorkerCounts:
        return WorkerCounts.count(worker.home for worker in staying(workers))

    async def ask(self, before: WorkerCounts, after: WorkerCounts) -> None:
        """Do nothing: the operator reads the printed decisions."""


T = TypeVar("T")


class BlockingCall:
    """Runs one blocking call at a time in a daemon thread, which does not delay the end of the
    process. ``what``: the service that is called, for messages."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._busy = False

    async def __call__(self, call: Callable[[], T], deadline_s: float) -> T:
        """Return what ``call`` returns or raise what it raises. Raises Unavailable at the deadline,
        and at once while an earlier call that was too late has not returned."""
        if self._busy:
            raise Unavailable(f"{self._what} has not answered an earlier call")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._busy = True
        args = (call, loop, future)
        threading.Thread(target=self._run, args=args, daemon=True, name=self._what).start()
        try:
            return await asyncio.wait_for(future, deadline_s)
        except TimeoutError:
            if future.cancelled():
                text = f"{self._what} does not answer within {deadline_s:g} s"
                raise Unavailable(text) from None
            raise

    def _run(
        self, call: Callable[[], T], loop: asyncio.AbstractEventLoop, future: asyncio.Future[T]
    ) -> None:
        result: T | None = None
        error: Exception | None = None
        try:
            result = call()
        except Exception as raised:
            error = raised
        self._busy = False

        def set_result() -> None:
            if future.done():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)  # type: ignore[arg-type]  # what the call returned

        if not loop.is_closed():
            loop.call_soon_threadsafe(set_result)
