"""The pool of workers: who the directory says there is, and whose stream is up.

    directory --every 0.5 s--> refresh: new decode worker   -> open a link, for good
                                        record gone         -> close the link, if its stream is down
                                        lent to prefill     -> close the link, when it is empty
                                        directory silent    -> keep what was known

A lost lease alone removes no decode worker: a stream that is up knows better.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from redis.exceptions import RedisError

from protocol.endpoints.grpc_endpoints import LOOPBACK, Security
from protocol.registry.directory import ModelInfo, WorkerRecord
from router.placement.step_model import PRIOR, StepModel, completed, parse, pooled
from router.workers.decode_link import DecodeLink

# MERGED router.lately
# Prefill workers that the directory lists, and those that it did until a moment ago.

GRACE_S = 2.5
"""How long a prefill worker counts that the directory no longer lists: twice, and some, what it
takes a living one to register again."""


class Lately:
    """A lease is lost by a directory that was emptied, too, and then its worker will be back;
    decode workers pass over the dead."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: dict[str, WorkerRecord] = {}
        self._seen: dict[str, float] = {}  # when each of them was last listed

    def update(self, records: Sequence[WorkerRecord]) -> dict[str, WorkerRecord]:
        """All prefill workers in use, by instance. ``records``: all that are listed; who is there
        in another role, or has the port of one that is not, ends the wait for it at once."""
        now = self._clock()
        listed = {r.instance: r for r in records if r.role == "prefill"}
        self._seen |= dict.fromkeys(listed, now)
        there = {r.instance for r in records}
        taken = {r.endpoint for r in records}
        missed = {
            instance: record
            for instance, record in self._known.items()
            if instance not in there
            and record.endpoint not in taken
            and now - self._seen[instance] < GRACE_S
        }
        self._known = {**listed, **missed}
        self._seen = {i: at for i, at in self._seen.items() if i in self._known}
        return dict(self._known)


# MERGED router.refusals
# Workers that the directory lists and a router does not use: each is named once in the log.

log = logging.getLogger(__name__)


class Refusals:
    """By instance; of one router."""

    def __init__(self) -> None:
        self._named: set[str] = set()

    def add(self, record: WorkerRecord, why: str) -> None:
        if record.instance not in self._named:
            self._named.add(record.instance)
            log.warning("ignoring %s worker %s: %s", record.role, record.endpoint, why)

    def other_model(self, record: WorkerRecord, expected: ModelInfo) -> None:
        has, due = _shown(record.model), _shown(expected)
        self.add(record, f"its {record.model.id} has {has}, expected {due}")


def _shown(model: ModelInfo) -> str:
    return f"fingerprint {model.fingerprint} ({model.precision})"


ListWorkers = Callable[[], Awaitable[list[WorkerRecord]]]


class Watcher(Protocol):
    """Who wants to know of the workers."""

    def on_workers(self, records: Sequence[WorkerRecord]) -> None:
        """All that are in use, whenever the directory has been looked into."""

    def on_load(self, instance: str, queued_tokens: int) -> None:
        """Prompt tokens queued at a worker, as it says."""


class Pool:
    def __init__(
        self,
        list_workers: ListWorkers,
        *,
        model_id: str,
        token: str,
        refresh_s: float,
        watcher: Watcher | None = None,
        security: Security = LOOPBACK,
    ) -> None:
        self._list = list_workers
        self._model_id = model_id
        self._token = token
        self._refresh_s = refresh_s
        self.links: dict[str, DecodeLink] = {}
        self.prefill: dict[str, WorkerRecord] = {}
        self._lately = Lately()
        self._parting: dict[str, DecodeLink] = {}  # links to workers that decode no more
        self._watcher = watcher
        self._step_models: dict[str, StepModel] = {}
        self._typical_step = PRIOR
        self._model: ModelInfo | None = None
        self._security = security
        self._refusals = Refusals()
        self._silent = self._closing = False
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self.refresh()
        self._task = asyncio.create_task(self._follow(), name="directory")

    async def close(self) -> None:
        self._closing = True  # a client library may swallow a cancellation
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        links = [*self.links.values(), *self._parting.values()]
        await asyncio.gather(*(link.close() for link in links))
        self.links.clear()

    @property
    def model(self) -> ModelInfo | None:
        """The model of the workers that are or were last known; None before the first."""
        return self._model

    @property
    def attached(self) -> int:
        """Decode workers whose stream is up."""
        return sum(link.attached for link in self.links.values())

    @property
    def records(self) -> list[WorkerRecord]:
        """All workers in use."""
        return [*self.prefill.values(), *(link.record for link in self.links.values())]

    def record(self, instance: str) -> WorkerRecord | None:
        """A worker of either role."""
        link = self.links.get(instance)
        return link.record if link is not None else self.prefill.get(instance)

    def step_model(self, instance: str) -> StepModel:
        """How long the worker's steps take; what others say where it does not."""
        return self._step_models.get(instance, self._typical_step)

    async def wait_change(self, timeout_s: float) -> None:
        """Until a stream comes up or goes down, or the time is over."""
        self._changed.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            pass

    async def refresh(self) -> None:
        """One look into the directory. When it does not answer, what was known stands."""
        try:
            records = await self._list()
        except (RedisError, OSError, TimeoutError) as error:
            if not self._silent:
                log.warning("directory does not answer; keeping the last view: %s", error)
            self._silent = True
            return
        if self._silent:
            log.info("directory answers again")
        self._silent = False
        await self._apply([r for r in records if r.model.id == self._model_id])

    async def _follow(self) -> None:
        while not self._closing:
            await asyncio.sleep(self._refresh_s)
            try:
                await self.refresh()
            except Exception:  # whatever one look brings, the next may be good
                log.exception("looking into the directory failed")

    async def _apply(self, records: list[WorkerRecord]) -> None:
        await self._drop_gone(records)
        records = self._same_model(self._reachable(records))
        self.prefill = self._lately.update(records)
        await self._part(records)
        for record in records:
            if record.role == "decode":
                self._link(record).update(record)
        self.told()

    async def _part(self, records: list[WorkerRecord]) -> None:
        """From workers that decode no more: a link ends when nothing is left on it. What was handed
        back may still be on its way."""
        for record in records:
            if record.role != "decode" and record.instance in self.links:
                self._parting[record.instance] = self.links.pop(record.instance)
        for instance, link in list(self._parting.items()):
            if link.idle:
                del self._parting[instance]
                await link.close()

    def _link(self, record: WorkerRecord) -> DecodeLink:
        """That to a decode worker; the old one where it had lent itself, and nothing has ended."""
        link = self.links.get(record.instance) or self._parting.pop(record.instance, None)
        if link is None:
            link = DecodeLink(record, self._token, self._changed.set, self._on_load, self._security)
            link.start()
        self.links[record.instance] = link
        return link

    def told(self) -> None:
        """The records in use may have changed: work out what follows from them."""
        records = self.records
        models = {r.instance: parse(r.step_model) for r in records}
        self._typical_step = pooled(models.values())
        self._step_models = {i: completed(m, self._typical_step) for i, m in models.items()}
        if self._watcher is not None:
            self._watcher.on_workers(records)
            for record in self.prefill.values():
                self._watcher.on_load(record.instance, record.queued_tokens)

    def _on_load(self, instance: str, queued_tokens: int) -> None:
        if self._watcher is not None:
            self._watcher.on_load(instance, queued_tokens)

    async def _drop_gone(self, records: list[WorkerRecord]) -> None:
        listed = {r.instance for r in records}
        endpoints = {r.endpoint for r in records}
        for instance, link in list(self.links.items()):
            # Another instance on its port: the stream, if it is up, is that one's.
            replaced = link.record.endpoint in endpoints
            if instance not in listed and (replaced or not link.attached):
                del self.links[instance]
                await link.close()

    def _reachable(self, records: list[WorkerRecord]) -> list[WorkerRecord]:
        """Those that this router may talk to: anybody who writes into Redis can name a host."""
        reachable = []
        for record in records:
            if self._security.permits(record.endpoint):
                reachable.append(record)
            else:
                self._refusals.add(record, "it is not on this machine, and there is no TLS")
        return reachable

    def _same_model(self, records: list[WorkerRecord]) -> list[WorkerRecord]:
        """Those that serve what the workers in use serve, bit by bit."""
        if not self.links:
            first = next((r.model for r in records if r.role == "decode"), None)
            self._model = first or self._model
        same = []
        for record in records:
            if self._model is None or _identity(record.model) == _identity(self._model):
                same.append(record)
            else:
                self._refusals.other_model(record, self._model)
        return same


def _identity(model: ModelInfo) -> tuple[str, str]:
    return model.fingerprint, model.precision
