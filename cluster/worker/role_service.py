"""The role of a worker, and the Roles RPC with which the autoscaler lends it to the other pool.

    prefill --SetRole decode--> decode               at once
    decode --SetRole prefill--> changing --streams have ended, or their time is over--> prefill
                                   |                 remaining streams move to other workers
                                   +--the worker stops--> decode, draining

A change keeps the weights, the KV cache, the instance id and the entries of the prefix index.
Prompts that a prefill worker has accepted are computed under the decode policy.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from typing import TypeAlias

import grpc

from decode_worker.service import DecodeService
from engine.process.client import EngineClient
from protocol.roles import ROLES, Role, parse_role
from protocol.wire import wire_pb2 as pb
from protocol.wire import wire_pb2_grpc as rpc

MAX_DRAIN_S = 3600.0
_POLL_S = 0.02

Context: TypeAlias = "grpc.aio.ServicerContext[pb.SetRoleRequest, pb.SetRoleReply]"


class RoleService(rpc.RolesServicer):
    """The role of one worker. ``on_change`` is called whenever the worker's record has changed, and
    ``report`` gets a line about each change of the role."""

    def __init__(
        self,
        home: Role,
        instance: str,
        engine: EngineClient,
        decode: DecodeService,
        on_change: Callable[[], None],
        report: Callable[[str], None],
    ) -> None:
        self.home = home
        self.role = home
        self.changing = False  # it drains before it takes the prefill role
        self.leaving = False
        self.role_changes: Counter[tuple[str, str]] = Counter()  # (from, to)
        self._instance = instance
        self._engine = engine
        self._decode = decode
        self._on_change = on_change
        self._report = report
        self._change: asyncio.Task[pb.SetRoleReply] | None = None

    def leave(self) -> None:
        """Keep the present role from now on, because the worker stops. Call it before the drain."""
        self.leaving = True
        if self._change is not None:
            self._change.cancel()

    async def SetRole(self, request: pb.SetRoleRequest, context: Context) -> pb.SetRoleReply:  # noqa: N802
        refusal = self._refusal(request)
        if refusal is not None:
            await context.abort(*refusal)
        change = asyncio.create_task(
            self._change_role(parse_role(request.role), request.drain_seconds)
        )
        self._change = change
        change.add_done_callback(self._forget_change)
        await asyncio.wait([change])  # a caller that disconnects cancels this wait only
        if change.cancelled():
            await context.abort(*_LEAVING)
        return change.result()

    def _refusal(self, request: pb.SetRoleRequest) -> tuple[grpc.StatusCode, str] | None:
        if request.instance != self._instance:
            return grpc.StatusCode.FAILED_PRECONDITION, "another worker is running at this address"
        if request.role not in ROLES:
            why = f"role must be 'prefill' or 'decode', not {request.role!r}"
            return grpc.StatusCode.INVALID_ARGUMENT, why
        if not 0 <= request.drain_seconds <= MAX_DRAIN_S:
            why = f"drain_seconds must be in 0..{MAX_DRAIN_S:g}, not {request.drain_seconds:g}"
            return grpc.StatusCode.INVALID_ARGUMENT, why
        if self.leaving:
            return _LEAVING
        if self._change is not None:
            return grpc.StatusCode.ABORTED, "a change of its role is in progress"
        return None

    def _forget_change(self, change: asyncio.Task[pb.SetRoleReply]) -> None:
        self._change = None

    async def _change_role(self, role: Role, drain_s: float) -> pb.SetRoleReply:
        if role == self.role:
            return pb.SetRoleReply(role=role)
        began, before = time.monotonic(), self.role
        handed_over = 0
        if role == "prefill":
            handed_over = await self._end_streams(drain_s)
        self._set_role(role)
        seconds = time.monotonic() - began
        self._report_change(before, seconds, handed_over)
        return pb.SetRoleReply(role=role, seconds=seconds, handed_over=handed_over)

    def _report_change(self, before: Role, seconds: float, handed_over: int) -> None:
        how = "back" if self.role == self.home else "lent"
        streams = f", streams handed over: {handed_over}" if before == "decode" else ""
        who = f"{self.home} worker {self._instance[:8]}"
        self._report(f"{who} is {how}: {before} -> {self.role} in {seconds:.2f} s{streams}")

    async def _end_streams(self, drain_s: float) -> int:
        """Refuse new requests and let streams end; return how many were handed over after that."""
        deadline = time.monotonic() + drain_s
        self.changing = True
        self._decode.drain()
        self._on_change()
        try:
            while self._decode.request_count and time.monotonic() < deadline:
                await asyncio.sleep(_POLL_S)
        finally:
            self.changing = False
        return self._decode.hand_back("the worker is lent to the prefill pool")

    def _set_role(self, role: Role) -> None:
        self.role_changes[self.role, role] += 1
        self.role = role
        self._engine.take_role(role)
        if role == "decode":
            self._decode.resume()
        self._on_change()


_LEAVING = grpc.StatusCode.FAILED_PRECONDITION, "this worker is stopping"
