"""Which workers are gone: decided by the directory and by direct probes together.

A lost lease is a hint. Redis may have been emptied, be full, or have lost a worker's record in any
other way, and then many leases lapse at once; a worker is removed only when a direct probe fails as
well. The probe of a decode worker is its stream (``DecodeLink``); a prefill worker, to which a
router holds no stream, is called by ``WorkerProbes``.

    listed --lease lapsed--> unlisted: probed --fails, GRACE_S after the last sign of life--> gone
       ^                         |
       +----- listed again ------+--another instance has its port, or its role is another--> gone
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from protocol.registry.directory import WorkerRecord
from router.workers.probes import WorkerProbes

GRACE_S = 2.5
"""How long a prefill worker counts after its last sign of life, although probes fail: somewhat more
than twice the time in which a living worker registers again."""


class KnownWorker(NamedTuple):
    """A worker in use. ``alive``: a stream to it is up. ``refuted``: a direct probe has failed."""

    record: WorkerRecord
    alive: bool
    refuted: bool


def who_is_gone(listed: Sequence[WorkerRecord], known: Iterable[KnownWorker]) -> set[str]:
    """Return the instances among ``known`` that are no more. ``listed``: the whole directory.

    Where another instance is listed with its port, a stream that is up is that one's."""
    instances = {record.instance for record in listed}
    endpoints = {record.endpoint for record in listed}
    return {
        worker.record.instance
        for worker in known
        if worker.record.instance not in instances
        and (worker.record.endpoint in endpoints or (worker.refuted and not worker.alive))
    }


class PrefillRegistry:
    """The prefill workers in use: those that the directory lists, and those that it listed and that
    are not gone. Owned by the ``WorkerPool``. A dead one does no harm meanwhile: decode workers
    pass it over.
    """

    def __init__(self, probes: WorkerProbes, clock: Callable[[], float] = time.monotonic) -> None:
        self._probes = probes
        self._clock = clock
        self._known: dict[str, WorkerRecord] = {}
        self._seen: dict[str, float] = {}  # last sign of life, by instance

    def update(
        self,
        records: Sequence[WorkerRecord],
        usable: Callable[[WorkerRecord], bool] = lambda record: True,
    ) -> dict[str, WorkerRecord]:
        """Return all prefill workers in use, by instance. ``records``: all that are listed.

        A worker that is listed with another role, or that is not ``usable`` any more, because the
        model has changed, is dropped at once."""
        now = self._clock()
        listed = {r.instance: r for r in records if r.role == "prefill" and usable(r)}
        self._seen |= dict.fromkeys(listed, now)
        for instance in self._seen:
            self._seen[instance] = max(
                self._seen[instance], self._probes.answered.get(instance, 0.0)
            )
        gone = who_is_gone(records, map(self._known_worker, self._known.values()))
        instances = {r.instance for r in records}
        unlisted = {
            instance: record
            for instance, record in self._known.items()
            if instance not in instances and instance not in gone and usable(record)
        }
        self._known = {**listed, **unlisted}
        self._seen = {i: at for i, at in self._seen.items() if i in self._known}
        self._probes.keep(unlisted)
        self._probes.start(unlisted.values())
        return dict(self._known)

    def _known_worker(self, record: WorkerRecord) -> KnownWorker:
        instance = record.instance
        is_overdue = self._clock() - self._seen[instance] >= GRACE_S
        refuted = is_overdue and instance in self._probes.failed
        return KnownWorker(record, alive=False, refuted=refuted)
