"""Carries out loans: asks workers by RPC to serve the other role (``Roles.SetRole``, served by
``cluster/worker/role_service.py``)."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import grpc
from msgspec.structs import replace
from redis.exceptions import RedisError

from cluster.settings.autoscaler_settings import AutoscalerSettings
from cluster.sizing.actions import ROLE_CHANGE_S
from cluster.sizing.decision import Loan
from cluster.sizing.snapshot import WorkerSnapshot
from protocol.endpoints.grpc_endpoints import EndpointSecurity
from protocol.errors import TransferFailed, Unavailable
from protocol.registry.directory import Directory, WorkerRecord
from protocol.roles import Role
from protocol.security import cluster_token
from protocol.wire import wire_pb2 as pb
from protocol.wire import wire_pb2_grpc as rpc

log = logging.getLogger("baton.autoscaler")

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


class PendingLoans:
    """Carries each loan out in a task of its own, because a drain may take minutes, and turns that
    waited for it would miss the traffic. The loop creates it and closes it.

        start --> its worker counts as changing --succeeds, and ROLE_CHANGE_S--> forgotten
                                                --fails--> its worker is not lent again for a while

    ``on_failure`` gets the reason of each failure.
    """

    def __init__(self, executor: LoanExecutor, on_failure: Callable[[str], None]) -> None:
        self._executor = executor
        self._on_failure = on_failure
        self._running: dict[str, tuple[Role, asyncio.Task[None]]] = {}  # by instance
        self._failed_s: dict[str, float] = {}  # by instance: when its loan failed

    def start(self, loans: Sequence[Loan]) -> None:
        """Begin loans, except those of workers that change their role already."""
        for loan in loans:
            if loan.instance not in self._running:
                task = asyncio.create_task(self._lend(loan), name=f"loan of {loan.instance[:8]}")
                self._running[loan.instance] = (loan.role, task)

    async def _lend(self, loan: Loan) -> None:
        try:
            why = await self._executor.lend(loan)
            if not why:
                await asyncio.sleep(ROLE_CHANGE_S)  # a record that is older is read no more
        except Exception as error:  # the worker can be lent again later
            log.exception("a loan failed")
            why = repr(error)
        finally:
            del self._running[loan.instance]
        if why:
            self._failed_s[loan.instance] = time.monotonic()
            self._on_failure(why)

    def roles(self) -> dict[str, Role]:
        """Return the roles that workers are about to take, by instance. Ask before workers are
        read: a loan may end while they are."""
        return {instance: role for instance, (role, _) in self._running.items()}

    def failed_since(self, since_s: float) -> tuple[str, ...]:
        """Return the instances of which a loan failed after ``since_s``, and forget the others."""
        self._failed_s = {i: at_s for i, at_s in self._failed_s.items() if at_s > since_s}
        return tuple(sorted(self._failed_s))

    async def close(self) -> None:
        """Stop waiting for loans; workers that change their role go on."""
        tasks = [task for _, task in self._running.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


def with_pending_roles(
    workers: Sequence[WorkerSnapshot], roles: dict[str, Role]
) -> tuple[WorkerSnapshot, ...]:
    """Return the workers, of which those that are about to take one of ``roles`` are changing, even
    if their records do not say so yet."""
    return tuple(
        replace(worker, role=roles[worker.instance], state="changing")
        if worker.instance in roles and worker.state != "leaving"
        else worker
        for worker in workers
    )


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
