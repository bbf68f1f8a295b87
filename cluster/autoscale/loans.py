"""Workers that serve the other role for a while: asked by RPC, all of a turn at once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from redis.exceptions import RedisError

from cluster.autoscale.lend import set_role
from cluster.autoscale.settings import AutoscalerSettings
from cluster.sizing.decision import Loan
from protocol.directory import Directory, WorkerRecord
from protocol.errors import Unavailable
from protocol.security import Security

_AT_ONCE = 32
_LOOK_S = 3.0


class Loans(Protocol):
    async def lend(self, loans: Sequence[Loan]) -> list[str]:
        """Returns when each has been carried out or has failed, with why those failed."""
        ...


class RoleLoans:
    """Finds the workers in the directory. Every loan has a deadline (``lend.MARGIN_S``)."""

    def __init__(self, directory: Directory, settings: AutoscalerSettings) -> None:
        self._directory = directory
        self._token = settings.token
        self._drain_s = settings.loan_drain_s
        self._security = Security(settings.tls)
        self._room = asyncio.Semaphore(_AT_ONCE)

    async def lend(self, loans: Sequence[Loan]) -> list[str]:
        if not loans:
            return []
        try:
            there = await self._workers()
        except Unavailable as error:
            return [f"{len(loans)} loans: {error}"]
        whys = await asyncio.gather(*(self._lend(loan, there) for loan in loans))
        return [why for why in whys if why]

    async def end(self) -> list[str]:
        """Everybody back to the pool that he was started for; why some are not."""
        try:
            there = await self._workers()
        except Unavailable as error:
            return [str(error)]
        lent = [
            Loan(instance=worker.instance, role="prefill" if home == "prefill" else "decode")
            for worker in there.values()
            if not worker.draining and (home := worker.home or worker.role) != worker.role
        ]
        return await self.lend(lent)

    async def _workers(self) -> dict[str, WorkerRecord]:
        try:
            async with asyncio.timeout(_LOOK_S):
                found = await self._directory.workers()
        except (RedisError, OSError, TimeoutError) as error:
            raise Unavailable(f"Redis does not say where workers are: {error}") from error
        return {worker.instance: worker for worker in found}

    async def _lend(self, loan: Loan, there: dict[str, WorkerRecord]) -> str:
        """Why it failed, or nothing."""
        worker = there.get(loan.instance)
        if worker is None:
            return f"worker {loan.instance[:8]} is gone"
        async with self._room:
            try:
                await set_role(
                    worker.endpoint,
                    worker.instance,
                    loan.role,
                    drain_s=self._drain_s,
                    token=self._token,
                    security=self._security,
                )
            except Unavailable as error:
                return str(error)
        return ""
