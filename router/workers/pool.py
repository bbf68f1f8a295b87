"""``WorkerPool``: the workers that the directory lists, with a link to each. That to a prefill
worker brings its load, which is what several routers know of each other's work.

    directory --every 0.5 s--> refresh: new decode worker   -> open a link
                                        record gone         -> close the link, if its stream is down
                                                               and cannot be opened; a prefill
                                                               worker stays while it answers probes
                                        lent to prefill     -> keep the link for the load
                                        no answer           -> keep the last view

A lost lease alone removes no worker (router/workers/departures.py). One pool per router; ``Placer``
reads it for each request.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from typing import Protocol

from redis.exceptions import RedisError

from protocol.endpoints.grpc_endpoints import LOOPBACK_ONLY, EndpointSecurity
from protocol.performance.step_model import (
    PRIOR_STEP_MODEL,
    StepModel,
    complete_step_model,
    mean_step_model,
    parse_step_model,
    trusted_alike,
)
from protocol.registry.directory import ModelInfo, WorkerRecord
from router.placement.ledger import QueuedPrompts
from router.workers.decode_link import DecodeLink
from router.workers.departures import KnownWorker, PrefillRegistry, who_is_gone
from router.workers.probes import WorkerProbes, probe_worker

log = logging.getLogger(__name__)

ListWorkers = Callable[[], Awaitable[list[WorkerRecord]]]


class WorkerListener(Protocol):
    """Is notified of workers and their load."""

    def on_workers(self, records: Sequence[WorkerRecord]) -> None:
        """All workers in use, after each refresh."""

    def on_load(self, instance: str, queued: QueuedPrompts, unseen: int) -> None:
        """Prompt tokens that a worker reports in its queue, and the prompts that they are of.
        ``unseen``: latest submits of this router that it had not seen by then."""


class WorkerPool:
    """The workers of one router: ``start`` -> refreshed in the background -> ``close``."""

    def __init__(
        self,
        list_workers: ListWorkers,
        *,
        model_id: str,
        token: str,
        refresh_s: float,
        listener: WorkerListener | None = None,
        security: EndpointSecurity = LOOPBACK_ONLY,
    ) -> None:
        self._list = list_workers
        self._model_id = model_id
        self._token = token
        self._refresh_s = refresh_s
        self.links: dict[str, DecodeLink] = {}
        self.prefill: dict[str, WorkerRecord] = {}
        self._probes = WorkerProbes(partial(probe_worker, token=token, security=security))
        self._prefill_registry = PrefillRegistry(self._probes)
        self._load_links: dict[str, DecodeLink] = {}  # to prefill workers, which push their load
        self._listener = listener
        self._step_models: dict[str, StepModel] = {}
        self._typical_step = PRIOR_STEP_MODEL
        self._model: ModelInfo | None = None
        self._security = security
        self._ignored = IgnoredWorkers()
        self._is_silent = self._is_closing = False
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self.refresh()
        self._task = asyncio.create_task(self._follow(), name="directory")

    async def close(self) -> None:
        self._is_closing = True  # a client library may swallow a cancellation
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        links = [*self.links.values(), *self._load_links.values()]
        await asyncio.gather(self._probes.close(), *(link.close() for link in links))
        self.links.clear()

    @property
    def model(self) -> ModelInfo | None:
        """The model of the workers; the last known one without workers, None before the first."""
        return self._model

    @property
    def attached(self) -> int:
        """Number of decode workers whose stream is up."""
        return sum(link.attached for link in self.links.values())

    @property
    def routers(self) -> int:
        """Number of routers that send requests to these workers, as far as they have said so."""
        return max((link.routers for link in self.links.values()), default=1)

    @property
    def records(self) -> list[WorkerRecord]:
        """All workers in use."""
        return [*self.prefill.values(), *(link.record for link in self.links.values())]

    def record(self, instance: str) -> WorkerRecord | None:
        """Return a worker of either role."""
        link = self.links.get(instance)
        return link.record if link is not None else self.prefill.get(instance)

    def serves_beside(self, link: DecodeLink) -> bool:
        """Return whether another decode worker is attached, and has an engine."""
        others = (other for other in self.links.values() if other is not link)
        return any(other.ready and not other.down for other in others)

    def step_model(self, instance: str) -> StepModel:
        """Return the worker's step times, or the mean of the others where it reports none."""
        return self._step_models.get(instance, self._typical_step)

    async def wait_change(self, timeout_s: float) -> None:
        """Wait until a stream comes up or goes down, or the time is over."""
        self._changed.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            pass

    async def refresh(self) -> None:
        """Read the directory once; keep the last view when it does not answer."""
        try:
            records = await self._list()
        except (RedisError, OSError, TimeoutError) as error:
            if not self._is_silent:
                log.warning(
                    "Redis does not answer; the last list of workers stays in use: %s", error
                )
            self._is_silent = True
            return
        if self._is_silent:
            log.info("Redis answers again")
        self._is_silent = False
        await self._apply([r for r in records if r.model.id == self._model_id])

    async def _follow(self) -> None:
        while not self._is_closing:
            await asyncio.sleep(self._refresh_s)
            try:
                await self.refresh()
            except Exception:  # the next refresh may succeed
                log.exception("reading the directory failed")

    async def _apply(self, records: list[WorkerRecord]) -> None:
        await self._drop_gone(records)
        self._ignored.retain({record.instance for record in records})
        listed = self._reachable(records)
        records = self._same_model(listed)
        self.prefill = self._prefill_registry.update(listed, self._has_model)
        self._sort_links(records)
        self.apply_records()
        await self._close_load_links()

    def _link(self, record: WorkerRecord) -> DecodeLink:
        """Take the link to a worker out of the others, where it is by its last role, or open it."""
        instance = record.instance
        link = self.links.pop(instance, None) or self._load_links.pop(instance, None)
        if link is None:
            link = DecodeLink(record, self._token, self._changed.set, self._on_load, self._security)
            link.start()
        return link

    def _sort_links(self, records: list[WorkerRecord]) -> None:
        """Sort the links by role and open new ones. Requests on a link to a worker that decodes no
        more end as they would have."""
        for record in records:
            if record.role == "decode" or record.instance in self.prefill:
                links = self.links if record.role == "decode" else self._load_links
                link = links[record.instance] = self._link(record)
                link.update(record)

    async def _close_load_links(self) -> None:
        """Close the links to prefill workers that are gone."""
        gone = [i for i, k in self._load_links.items() if i not in self.prefill and k.idle]
        for instance in gone:
            await self._load_links.pop(instance).close()

    def apply_records(self) -> None:
        """Derive step models from the records in use, and notify the listener."""
        records = self.records
        models = {r.instance: parse_step_model(r.step_model) for r in records}
        self._typical_step = mean_step_model(models.values())
        self._step_models = trusted_alike(
            {i: complete_step_model(m, self._typical_step) for i, m in models.items()}
        )
        if self._listener is not None:
            self._listener.on_workers(records)

    def _on_load(self, instance: str, queued: QueuedPrompts, unseen: int) -> None:
        # The link to a worker that is gone stays open while requests are on it.
        if self._listener is not None and self.record(instance) is not None:
            self._listener.on_load(instance, queued, unseen)

    async def _drop_gone(self, records: list[WorkerRecord]) -> None:
        known = [
            KnownWorker(link.record, link.attached, refuted=link.failed_attempts > 0)
            for link in self.links.values()
        ]
        for instance in who_is_gone(records, known):
            await self.links.pop(instance).close()

    def _reachable(self, records: list[WorkerRecord]) -> list[WorkerRecord]:
        """Return those that this router may connect to: a record in Redis can name any host."""
        reachable = []
        for record in records:
            if self._security.permits(record.endpoint):
                reachable.append(record)
            else:
                self._ignored.add(
                    record, "it is not on this machine, and connections to other machines need TLS"
                )
        return reachable

    def _same_model(self, records: list[WorkerRecord]) -> list[WorkerRecord]:
        """Return those that serve exactly the model of the workers in use."""
        if not self.links:
            first = next((r.model for r in records if r.role == "decode"), None)
            self._model = first or self._model
        same = []
        for record in records:
            if self._has_model(record):
                same.append(record)
            else:
                assert self._model is not None
                self._ignored.add_other_model(record, self._model)
        return same

    def _has_model(self, record: WorkerRecord) -> bool:
        return self._model is None or _identity(record.model) == _identity(self._model)


def _identity(model: ModelInfo) -> tuple[str, str]:
    return model.fingerprint, model.precision


class IgnoredWorkers:
    """Workers that the directory lists and this router does not use; logs each one once.

    A worker that the directory no longer lists is forgotten: workers that crash and start again all
    day, each time as another instance, must not take memory for ever.
    """

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def retain(self, listed: AbstractSet[str]) -> None:
        """Forget all workers but these, by instance."""
        self._logged &= listed

    def add(self, record: WorkerRecord, why: str) -> None:
        if record.instance not in self._logged:
            self._logged.add(record.instance)
            log.warning("ignoring the %s worker %s: %s", record.role, record.endpoint, why)

    def add_other_model(self, record: WorkerRecord, expected: ModelInfo) -> None:
        has, due = _model_text(record.model), _model_text(expected)
        self.add(record, f"its {record.model.id} has {has}, expected {due}")


def _model_text(model: ModelInfo) -> str:
    return f"fingerprint {model.fingerprint} ({model.precision})"
