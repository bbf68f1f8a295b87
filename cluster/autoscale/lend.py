"""Asks a worker to take the other role (``Roles.SetRole``, served by ``cluster/roles.py``)."""

from __future__ import annotations

from typing import NamedTuple

import grpc

from protocol import auth
from protocol import wire_pb2 as pb
from protocol import wire_pb2_grpc as rpc
from protocol.errors import TransferFailed, Unavailable
from protocol.security import Security

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
        reply = await stub.SetRole(request, timeout=deadline_s, metadata=auth.metadata(token))
    except grpc.aio.AioRpcError as error:
        raise Unavailable(
            f"worker {instance[:8]} at {endpoint} does not take the role {role}:"
            f" {error.code().name} {error.details()}"
        ) from error
    finally:
        await channel.close()
    return Lent(reply.role, reply.seconds, reply.handed_over)
