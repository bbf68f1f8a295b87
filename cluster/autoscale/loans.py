"""Carries out loans: asks workers by RPC to serve the other role (``Roles.SetRole``, served by
``cluster/worker/role_service.py``)."""

from __future__ import annotations

import asyncio
from typing import NamedTuple, Protocol

import grpc
from redis.exceptions import RedisError

from cluster.settings.autoscaler_settings import AutoscalerSettings
from cluster.sizing.decision import Loan
from protocol.endpoints.grpc_endpoints import EndpointSecurity
from protocol.errors import TransferFailed, Unavailable
from protocol.registry.directory import Directory, WorkerRecord
from protocol.security import cluster_token
from protocol.wire import wire_pb2 as pb
from protocol.wire import wire_pb2_grpc as rpc

ROLE_CHANGE_MARGIN_S = 5.0
"""Seconds that a role change may take beyond its drain: hand-overs and the RPC itself."""


class RoleChange(NamedTuple):
    """A worker's reply: the role that it has now, the seconds that the change took, and the number
    of requests that were handed over to other workers."""

    role: str
    seconds: float
    handed_over: int


async def request_role_change(
    endpoint: str,
    instance: str,
    role: str,
    *,
    drain_s: float,
    token: str,
    security: EndpointSecurity,
    deadline_s: float | None = None,
) -> RoleChange:
    """Ask the worker ``instance`` at ``endpoint`` (host:port) to change its role to ``role``.

    Requests that it decodes have ``drain_s`` seconds to end before they continue elsewhere. Raises
    Unavailable with the reason: not reached, refused, or no answer within ``deadline_s`` (None: the
    drain and ROLE_CHANGE_MARGIN_S). In the last case the worker may have changed nevertheless: its
    record in the directory shows it.
    """
    deadline_s = drain_s + ROLE_CHANGE_MARGIN_S if deadline_s is None else deadline_s
    request = pb.SetRoleRequest(role=role, drain_seconds=drain_s, instance=instance)
    try:
        channel = security.async_channel(endpoint)
    except TransferFailed as error:
        raise Unavailable(str(error)) from error
    stub: rpc.RolesAsyncStub = rpc.RolesStub(channel)
    try:
        reply = await stub.SetRole(
            request, timeout=deadline_s, metadata=cluster_token.token_metadata(token)
        )
    except grpc.aio.AioRpcError as error:
        raise Unavailable(
            f"worker {instance[:8]} at {endpoint} does not take the role {role}:"
            f" {error.code().name} {error.details()}"
        ) from error
    finally:
        await channel.close()
    return RoleChange(reply.role, reply.seconds, reply.handed_over)


_AT_ONCE = 32
_LOOK_S = 3.0


class LoanExecutor(Protocol):
    """Changes the roles of workers."""

    async def lend(self, loan: Loan) -> str:
        """Carry out the loan; return why it failed, or nothing. It has a deadline."""
        ...


class GrpcLoanExecutor:
    """Finds the workers in the directory and asks them by gRPC."""

    def __init__(self, directory: Directory, settings: AutoscalerSettings) -> None:
        self._directory = directory
        self._token = settings.token
        self._drain_s = settings.loan_drain_s
        self._security = EndpointSecurity(settings.tls)
        self._slots = asyncio.Semaphore(_AT_ONCE)

    async def lend(self, loan: Loan) -> str:
        try:
            workers = await self._workers()
        except Unavailable as error:
            return str(error)
        return await self._lend(loan, workers)

    async def end_all(self) -> list[str]:
        """Return all lent workers to the pool they were started for; return the reasons of
        failures."""
        try:
            workers = await self._workers()
        except Unavailable as error:
            return [str(error)]
        lent = [
            Loan(instance=worker.instance, role="prefill" if home == "prefill" else "decode")
            for worker in workers.values()
            if not worker.draining and (home := worker.home or worker.role) != worker.role
        ]
        whys = await asyncio.gather(*(self._lend(loan, workers) for loan in lent))
        return [why for why in whys if why]

    async def _workers(self) -> dict[str, WorkerRecord]:
        try:
            async with asyncio.timeout(_LOOK_S):
                found = await self._directory.workers.all()
        except (RedisError, OSError, TimeoutError) as error:
            raise Unavailable(f"the list of workers cannot be read from Redis: {error}") from error
        return {worker.instance: worker for worker in found}

    async def _lend(self, loan: Loan, workers: dict[str, WorkerRecord]) -> str:
        """Return why the loan failed, or nothing."""
        worker = workers.get(loan.instance)
        if worker is None:
            return f"worker {loan.instance[:8]} is gone"
        async with self._slots:
            try:
                await request_role_change(
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
