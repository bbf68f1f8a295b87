"""Asks workers directly whether they live, when the directory lists them no more.

``PrefillRegistry`` starts the probes and reads their results; the pool of a router owns both. The
number of probes at once, their rate and their duration are bounded.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterable

import grpc
import grpc.aio

from protocol.endpoints.grpc_endpoints import INSTANCE_KEY, EndpointSecurity
from protocol.errors import TransferFailed
from protocol.registry.directory import WorkerRecord
from protocol.security import cluster_token
from protocol.wire import wire_pb2 as pb
from protocol.wire import wire_pb2_grpc as rpc

log = logging.getLogger(__name__)

PROBE_EVERY_S = 1.0
"""Least time between two probes of one worker by one router."""

PROBE_S = 2.0
"""How long a worker has to answer a probe."""

MAX_PROBES = 8
"""Probes of one router at once; other workers wait for their turn and count as alive."""

Probe = Callable[[WorkerRecord], Awaitable[bool]]


async def probe_worker(record: WorkerRecord, token: str, security: EndpointSecurity) -> bool:
    """Return whether the worker at the record's endpoint is that instance and answers.

    Every worker serves ``Decode.Attach``, whatever its role, and its first message comes at once;
    another instance refuses the call."""
    metadata = (*cluster_token.token_metadata(token), (INSTANCE_KEY, record.instance))
    try:
        async with asyncio.timeout(PROBE_S), security.async_channel(record.endpoint) as channel:
            stub: rpc.DecodeAsyncStub = rpc.DecodeStub(channel)
            call = stub.Attach(metadata=metadata)
            try:
                return isinstance(await call.read(), pb.WorkerMessage)
            finally:
                call.cancel()
    except (grpc.aio.AioRpcError, TimeoutError, TransferFailed):
        return False


class WorkerProbes:
    """Probes workers in the background, and remembers the results until ``keep`` forgets them."""

    def __init__(self, probe: Probe, clock: Callable[[], float] = time.monotonic) -> None:
        self._probe = probe
        self._clock = clock
        self._began: dict[str, float] = {}  # last probe, by instance
        self._running: dict[str, asyncio.Task[None]] = {}
        self.failed: set[str] = set()  # instances whose last probe failed
        self.answered: dict[str, float] = {}  # when a probe last succeeded, by instance

    def keep(self, instances: Iterable[str]) -> None:
        """Forget all but these workers; their probes are cancelled."""
        kept = set(instances)
        for instance in self._began.keys() - kept:
            del self._began[instance]
            self.failed.discard(instance)
            self.answered.pop(instance, None)
            if (task := self._running.pop(instance, None)) is not None:
                task.cancel()

    def start(self, records: Iterable[WorkerRecord]) -> None:
        """Probe those whose last probe was long enough ago, the longest first."""
        now = self._clock()

        def idle_s(record: WorkerRecord) -> float:
            return now - self._began.get(record.instance, -math.inf)

        due = [r for r in records if idle_s(r) >= PROBE_EVERY_S and r.instance not in self._running]
        due.sort(key=idle_s, reverse=True)
        for record in due[: MAX_PROBES - len(self._running)]:
            self._began[record.instance] = now
            self._running[record.instance] = asyncio.create_task(self._run(record), name="probe")

    async def _run(self, record: WorkerRecord) -> None:
        try:
            is_alive = await self._probe(record)
        except Exception:  # a bug, which says nothing about the worker
            log.exception("probing worker %s failed", record.endpoint)
            return
        finally:
            if self._running.get(record.instance) is asyncio.current_task():
                del self._running[record.instance]
        if is_alive:
            self.failed.discard(record.instance)
            self.answered[record.instance] = self._clock()
        else:
            self.failed.add(record.instance)

    async def close(self) -> None:
        tasks = list(self._running.values())
        self.keep(())
        await asyncio.gather(*tasks, return_exceptions=True)
