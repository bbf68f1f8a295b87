"""``TenantSlots``: turns of tenants at work of which only little may run at once.

Used for texts that take long to tokenize (``router.openai.prompts``) and for grammars that are
compiled (``router.openai.chat.grammar_checker``).
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque

MAX_WAITING = 256
"""Most pieces of work that wait for one tenant: each holds a request's body in memory."""


class TenantSlots:
    """Admits at most ``width`` pieces of work at once, and ``per_tenant`` of one tenant.

    Tenants that wait take turns, whatever the number of requests that each has sent: a tenant
    waits for the work in progress and for one turn of each other tenant, never for a backlog.
    """

    def __init__(self, width: int, per_tenant: int = 1) -> None:
        self._width = width
        self._per_tenant = per_tenant
        self._busy: Counter[str] = Counter()  # work in progress, by tenant
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    async def enter(self, tenant: str, seconds: float) -> None:
        """Wait for a slot; the caller leaves it with ``leave``.

        Raises TimeoutError, at once where too much work of this tenant waits already.
        """
        if tenant not in self._waiting and self._can_enter(tenant):
            self._busy[tenant] += 1
            return
        queue = self._waiting.setdefault(tenant, deque())
        if len(queue) >= MAX_WAITING:
            raise TimeoutError
        turn = asyncio.get_running_loop().create_future()
        queue.append(turn)
        try:
            await asyncio.wait([turn], timeout=max(0.0, seconds))
        except asyncio.CancelledError:
            if turn.done():
                self.leave(tenant)
            else:
                self._forget(tenant, turn)
            raise
        if not turn.done():
            self._forget(tenant, turn)
            raise TimeoutError

    def leave(self, tenant: str) -> None:
        """Free a slot, which the next tenant takes that may."""
        self._busy[tenant] -= 1
        if not self._busy[tenant]:
            del self._busy[tenant]
        self._admit()

    def _admit(self) -> None:
        for tenant in list(self._waiting):
            if not self._can_enter(tenant):
                continue
            self._busy[tenant] += 1
            turn = self._waiting[tenant][0]
            self._forget(tenant, turn)
            turn.set_result(None)
            if tenant in self._waiting:
                self._waiting.move_to_end(tenant)  # its next turn comes after the others'

    def _forget(self, tenant: str, turn: asyncio.Future[None]) -> None:
        queue = self._waiting[tenant]
        queue.remove(turn)
        if not queue:
            del self._waiting[tenant]

    def _can_enter(self, tenant: str) -> bool:
        return self._busy.total() < self._width and self._busy[tenant] < self._per_tenant
