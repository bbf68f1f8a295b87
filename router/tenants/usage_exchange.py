"""``UsageExchange``: carries usage among the routers of a cluster, through Redis.

    every EXCHANGE_S:  own record --> Redis, expires --> other routers
                       others' records --> UsageBook.on_others, TenantQuotas

    baton:{cluster}:usages    baton:{cluster}:usage:{instance}    UsageRecord

No request waits for it. While Redis is full, slow or gone, every router knows its own part only.
Started and closed by ``open_router_state``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

import redis.asyncio as redis
from redis.exceptions import RedisError

from protocol.registry.leases import Leases
from router.tenants.peer_usage import (
    RECORD_BYTES,
    OwnReport,
    PeerReports,
    UsageRecord,
    is_valid_usage,
)
from router.tenants.quotas import TenantQuotas
from router.tenants.usage import UsageBook

log = logging.getLogger(__name__)

EXCHANGE_S = 0.5
_REDIS_S = 1.0  # time limit of Redis for one exchange
_RUNNING_S = 5.0  # seconds for which others' running choices count without a new report


def usage_leases(client: redis.Redis, cluster: str) -> Leases[UsageRecord]:
    """Return the records of all routers of a cluster."""
    return Leases(client, f"baton:{cluster}:usage", UsageRecord, is_valid_usage, RECORD_BYTES)


class UsageExchange:
    """The exchange of one router: created -> start -> close.

    ``is_known``: whether a name is a tenant's. ``clock`` is in seconds.
    """

    def __init__(
        self,
        leases: Leases[UsageRecord],
        instance: str,
        book: UsageBook,
        quotas: TenantQuotas,
        is_known: Callable[[str], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._leases, self._instance = leases, instance
        self._book, self._quotas, self._clock = book, quotas, clock
        self._own = OwnReport(instance)
        self._peers = PeerReports(instance, is_known)
        self._heard = clock()
        self._answers = True
        self._told = set[type[Exception]]()  # unexpected kinds of errors that have been logged
        self._closed = False  # a client library may swallow a cancellation
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="usage exchange")

    async def close(self) -> None:
        """Stop, and delete the record. Idempotent."""
        if self._task is None:
            return
        self._closed = True
        self._task.cancel()
        await asyncio.wait([self._task])
        self._task = None
        with contextlib.suppress(RedisError, OSError, TimeoutError):
            async with asyncio.timeout(_REDIS_S):
                await self._leases.remove(self._instance)

    async def exchange(self) -> None:
        """Publish and read once. Raises RedisError, OSError or TimeoutError."""
        book, running = self._book, self._quotas.running()
        own = self._own.record(book.own(), book.take_changed(), running, self._clock())
        async with asyncio.timeout(_REDIS_S):
            # Reading comes first: a Redis that is full refuses to write, and can still be read.
            self.use(await self._leases.all())
            await self._leases.renew(own)  # empty ones too: others learn when a tenant comes back

    def use(self, records: list[UsageRecord]) -> None:
        """Pass on what the others report."""
        self._heard = now = self._clock()
        for name, usage in self._peers.differences(records, now).items():
            self._book.on_others(name, usage)
        self._quotas.set_running_elsewhere(self._peers.running(records))

    async def _run(self) -> None:
        while not self._closed:
            try:
                await self.exchange()
            except (RedisError, OSError, TimeoutError) as error:
                self._on_failure(error)
            except Exception as error:  # such as a defect: the limits over routers must live on
                if type(error) not in self._told:
                    self._told.add(type(error))
                    log.exception("an exchange of usage failed unexpectedly")
                self._on_failure(error)
            else:
                if not self._answers:
                    log.warning("usage of tenants is exchanged with the other routers again")
                self._answers = True
            await asyncio.sleep(EXCHANGE_S)

    def _on_failure(self, error: Exception) -> None:
        if self._answers:
            log.warning("usage of tenants is not exchanged with the other routers: %s", error)
        self._answers = False
        if self._clock() - self._heard > _RUNNING_S:
            self._quotas.set_running_elsewhere({})
