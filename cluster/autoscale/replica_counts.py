"""Numbers of workers, by home: what there is to be asked for, and how."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from cluster.sizing.snapshot import Counts, Worker
from protocol.errors import Unavailable
from protocol.roles import ROLES


class Replicas(Protocol):
    """Raises Unavailable: then nothing is known, or nothing was changed for sure. ``changes``:
    somebody starts and ends workers when asked."""

    changes: bool

    async def targets(self, workers: Sequence[Worker]) -> Counts:
        """Workers that are asked for now. ``workers``: those that are there."""
        ...

    async def ask(self, before: Counts, after: Counts) -> None:
        """For other numbers. Returns when that was understood, not when they are there."""
        ...


class NoReplicas:
    """Without Ray: nobody here starts a worker or ends one. Who is there is who was asked for."""

    changes = False

    async def targets(self, workers: Sequence[Worker]) -> Counts:
        staying = [worker.home for worker in workers if worker.state != "leaving"]
        return Counts(**{role: staying.count(role) for role in ROLES})

    async def ask(self, before: Counts, after: Counts) -> None:
        """Whoever reads the lines is asked."""


# MERGED cluster.autoscale.aside
# Calls that block, away from the event loop.

T = TypeVar("T")


class Aside:
    """One call at a time, in a thread that nobody waits for at the end of the process. ``what``:
    whom it asks, for messages."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._busy = False

    async def __call__(self, call: Callable[[], T], deadline_s: float) -> T:
        """What ``call`` returns or raises. Raises Unavailable at the deadline; and at once while
        an earlier call, which was too late, has not come back."""
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

        def settle() -> None:
            if future.done():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)  # type: ignore[arg-type]  # what the call returned

        if not loop.is_closed():
            loop.call_soon_threadsafe(settle)
