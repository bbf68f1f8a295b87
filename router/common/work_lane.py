"""``WorkLane``: threads for work that would keep the event loop, shared fairly by tenants.

``asyncio.to_thread`` has one queue for all: the backlog of one tenant delays every other one, and
nothing there ends a wait. A lane has threads of its own, turns of tenants, and deadlines.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

from router.common.errors import ApiError, overloaded
from router.common.tenant_slots import TenantSlots

MAX_WAIT_S = 60.0
"""Bound of a wait for requests whose deadline is later."""

_RETRY_AFTER_S = 1.0
T = TypeVar("T")


class WorkClaim(NamedTuple):
    """Whose work it is, and when it comes too late."""

    tenant: str = ""
    due: float = math.inf  # on time.perf_counter: when the first token of the request is due

    def seconds_left(self) -> float:
        return min(MAX_WAIT_S, self.due - time.perf_counter())


class WorkLane:
    """``width`` threads, of which one tenant gets ``per_tenant`` at once. Closed by its owner."""

    def __init__(self, name: str, width: int, per_tenant: int) -> None:
        self._slots = TenantSlots(width, per_tenant)
        self._threads = ThreadPoolExecutor(width, thread_name_prefix=name)

    async def run(self, claim: WorkClaim, what: str, work: Callable[[float], T]) -> T:
        """Return the result of ``work``, which gets the seconds that are left for it.

        Raises what ``work`` raises, and ApiError (429) about ``what`` when the claim is due: work
        that has begun by then keeps its slot until it ends.
        """
        try:
            await self._slots.enter(claim.tenant, claim.seconds_left())
        except TimeoutError:
            raise _too_late(what) from None
        left_s = claim.seconds_left()
        if left_s <= 0:
            self._slots.leave(claim.tenant)
            raise _too_late(what)
        running = asyncio.get_running_loop().run_in_executor(self._threads, work, left_s)
        running.add_done_callback(lambda done: self._leave(claim.tenant, done))
        try:
            return await asyncio.wait_for(asyncio.shield(running), left_s)
        except TimeoutError:
            raise _too_late(what) from None

    def close(self) -> None:
        """Start no more work; what runs ends by itself."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _leave(self, tenant: str, done: asyncio.Future[T]) -> None:
        if not done.cancelled():
            done.exception()  # the request may be gone: this is no unexpected error
        self._slots.leave(tenant)


def _too_late(what: str) -> ApiError:
    message = f"{what} could not be tokenized before the deadline of the first token; try again"
    return overloaded(message, _RETRY_AFTER_S)
