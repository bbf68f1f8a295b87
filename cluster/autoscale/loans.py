"""Workers that serve the other role for a while: asked by RPC, all of a turn at once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import grpc
from redis.exceptions import RedisError

from cluster.settings.autoscaler_settings import AutoscalerSettings
from cluster.sizing.decision import Loan
from protocol.endpoints.grpc_endpoints import Security
from protocol.errors import TransferFailed, Unavailable
from protocol.registry.directory import Directory, WorkerRecord
from protocol.security import cluster_token
from protocol.wire import wire_pb2 as pb
from protocol.wire import wire_pb2_grpc as rpc

# MERGED cluster.autoscale.lend
# Asks a worker to take the other role (``Roles.SetRole``, served by
# ``cluster/worker/role_service.py``).

MARGIN_S = 5.0
"""That a change may take beyond its drain: hand-overs, and the way there and back."""


class Lent(NamedTuple):
    """What the worker says: the role that it has now, the seconds that the change took, and the
    requests that go on at other workers."""

    role: str
    seconds: float
    handed_over: int


async def set_role(
    endpoint: str,
    instance: str,
    role: str,
    *,
    drain_s: float,
    token: str,
    security: Security,
    deadline_s: float | None = None,
) -> Lent:
    """Have the worker ``instance`` at ``endpoint`` (host:port) work as ``role``. Streams that
    it decodes have ``drain_s`` seconds to end, before they go on elsewhere.

    Raises Unavailable with the reason: not reached, refused, or no answer within ``deadline_s``
    (None: the drain and MARGIN_S). After the last one the worker may have changed all the same:
    its record in the directory tells."""
    deadline_s = drain_s + MARGIN_S if deadline_s is None else deadline_s
    request = pb.SetRoleRequest(role=role, drain_seconds=drain_s, instance=instance)
    try:
        channel = security.async_channel(endpoint)
    except TransferFailed as error:
        raise Unavailable(str(error)) from error
    stub: rpc.RolesAsyncStub = rpc.RolesStub(channel)
    try:
        reply = await stub.SetRole(
            request, timeout=deadline_s, metadata=cluster_token.metadata(token)
        )
    except grpc.aio.AioRpcError as error:
        raise Unavailable(
            f"worker {instance[:8]} at {endpoint} does not take the role {role}:"
            f" {error.code().name} {error.details()}"
        ) from error
    finally:
        await channel.close()
    return Lent(reply.role, reply.seconds, reply.handed_over)


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
