"""How long workers take to start, as the autoscaler observes it; the simulator's does, too."""

from __future__ import annotations

from collections.abc import Iterable

from cluster.sizing.snapshot import WorkerCounts, WorkerSnapshot, staying
from protocol.roles import ROLES, Role

_WEIGHT = 0.3  # of the newest in the average
_LONGEST_S = 3600.0  # a start that was asked for so long ago has failed
_FORGET_S = 600.0  # a worker that returns after this counts as new, as for the directory's reader


class StartTimeEstimate:
    """Estimates the seconds from asking for a worker to its registration.

    ``seconds`` is the average, or ``assumed_s`` until a requested worker has registered. A new
    worker counts as the one that was asked for first, once its pool has as many workers as were
    asked for then. One that replaces a dead worker does not, because another time began its start.
    """

    def __init__(self, assumed_s: float) -> None:
        self.seconds = assumed_s
        self._seen = False
        # When each instance was last there; None before the first observation.
        self._known: dict[str, float] | None = None
        # of each awaited worker: when it was asked for, and the size that the pool has with it
        self._asked: dict[Role, list[tuple[float, int]]] = {role: [] for role in ROLES}

    def record_request(self, before: WorkerCounts, after: WorkerCounts, at_s: float) -> None:
        """Record that other numbers of workers were asked for, by home."""
        for role in ROLES:
            more, pending = after.of(role) - before.of(role), self._asked[role]
            if more > 0:
                pending += [(at_s, before.of(role) + n) for n in range(1, more + 1)]
            elif more < 0:
                del pending[max(0, len(pending) + more) :]  # the last to be asked for

    def observe(self, workers: Iterable[WorkerSnapshot], at_s: float) -> None:
        """Record the workers that are registered now."""
        there = list(workers)
        homes = {worker.instance: worker.home for worker in there}
        sizes = WorkerCounts.count(worker.home for worker in staying(there))
        new = homes.keys() - self._known.keys() if self._known is not None else set()
        known = (self._known or {}) | dict.fromkeys(homes, at_s)
        self._known = {i: last_s for i, last_s in known.items() if at_s - last_s < _FORGET_S}
        for role, pending in self._asked.items():
            while pending and at_s - pending[0][0] > _LONGEST_S:
                del pending[0]
            for _ in [instance for instance in new if homes[instance] == role]:
                if pending and sizes.of(role) >= pending[0][1]:
                    self._average(at_s - pending.pop(0)[0])

    def _average(self, seconds: float) -> None:
        first, self._seen = not self._seen, True
        self.seconds = seconds if first else self.seconds + _WEIGHT * (seconds - self.seconds)
