"""The role of a worker, and the Roles RPC that changes it: a worker lends itself to the other pool.

    prefill --SetRole decode--> decode               at once
    decode --SetRole prefill--> changing --streams have ended, or their time is over--> prefill
                                   |                 what is left goes on at other workers
                                   +--the worker goes--> decode, draining

Weights, KV cache, instance id and what the index has of it stay. Prompts that a prefill worker has
accepted are computed under the decode policy.
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
from protocol.roles import ROLES, Role, as_role
from protocol.wire import wire_pb2 as pb
from protocol.wire import wire_pb2_grpc as rpc

MOST_DRAIN_S = 3600.0
_LOOK_S = 0.02

Context: TypeAlias = "grpc.aio.ServicerContext[pb.SetRoleRequest, pb.SetRoleReply]"


class Roles(rpc.RolesServicer):
    """Of one worker. ``changed`` is called whenever its record is another one; ``say`` has a line
    of every change."""

    def __init__(
        self,
        home: Role,
        instance: str,
        engine: EngineClient,
        decode: DecodeService,
        changed: Callable[[], None],
        say: Callable[[str], None],
    ) -> None:
        self.home = home
        self.role = home
        self.changing = False  # it drains before it takes the other role
        self.leaving = False
        self.flips: Counter[tuple[str, str]] = Counter()  # (from, to)
        self._instance = instance
        self._engine = engine
        self._decode = decode
        self._changed = changed
        self._say = say
        self._change: asyncio.Task[pb.SetRoleReply] | None = None

    def leave(self) -> None:
        """The worker goes: it keeps the role that it has. Call it before the services drain."""
        self.leaving = True
        if self._change is not None:
            self._change.cancel()

    async def SetRole(self, request: pb.SetRoleRequest, context: Context) -> pb.SetRoleReply:  # noqa: N802
        refusal = self._refusal(request)
        if refusal is not None:
            await context.abort(*refusal)
        change = asyncio.create_task(self._take(as_role(request.role), request.drain_seconds))
        self._change = change
        change.add_done_callback(self._ended)
        await asyncio.wait([change])  # a caller that goes away cancels this, and not the change
        if change.cancelled():
            await context.abort(*_LEAVING)
        return change.result()

    def _refusal(self, request: pb.SetRoleRequest) -> tuple[grpc.StatusCode, str] | None:
        if request.instance != self._instance:
            return grpc.StatusCode.FAILED_PRECONDITION, "another instance is here"
        if request.role not in ROLES:
            why = f"role must be 'prefill' or 'decode', not {request.role!r}"
            return grpc.StatusCode.INVALID_ARGUMENT, why
        if not 0 <= request.drain_seconds <= MOST_DRAIN_S:
            why = f"drain_seconds must be in 0..{MOST_DRAIN_S:g}, not {request.drain_seconds:g}"
            return grpc.StatusCode.INVALID_ARGUMENT, why
        if self.leaving:
            return _LEAVING
        if self._change is not None:
            return grpc.StatusCode.ABORTED, "a change of its role is under way"
        return None

    def _ended(self, change: asyncio.Task[pb.SetRoleReply]) -> None:
        self._change = None

    async def _take(self, role: Role, drain_s: float) -> pb.SetRoleReply:
        if role == self.role:
            return pb.SetRoleReply(role=role)
        began, before = time.monotonic(), self.role
        handed_over = 0
        if role == "prefill":
            handed_over = await self._end_streams(drain_s)
        self._become(role)
        seconds = time.monotonic() - began
        self._tell(before, seconds, handed_over)
        return pb.SetRoleReply(role=role, seconds=seconds, handed_over=handed_over)

    def _tell(self, before: Role, seconds: float, handed_over: int) -> None:
        how = "back" if self.role == self.home else "lent"
        streams = f", streams handed over: {handed_over}" if before == "decode" else ""
        who = f"{self.home} worker {self._instance[:8]}"
        self._say(f"{who} is {how}: {before} -> {self.role} in {seconds:.2f} s{streams}")

    async def _end_streams(self, drain_s: float) -> int:
        """Take no request from here on; returns how many had to be handed over."""
        deadline = time.monotonic() + drain_s
        self.changing = True
        self._decode.drain()
        self._changed()
        try:
            while self._decode.jobs and time.monotonic() < deadline:
                await asyncio.sleep(_LOOK_S)
        finally:
            self.changing = False
        return self._decode.hand_over("the worker is lent to the prefill pool")

    def _become(self, role: Role) -> None:
        self.flips[self.role, role] += 1
        self.role = role
        self._engine.take_role(role)
        if role == "decode":
            self._decode.resume()
        self._changed()


_LEAVING = grpc.StatusCode.FAILED_PRECONDITION, "this worker goes"
