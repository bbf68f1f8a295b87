"""How long a worker takes to start: from the asking for it to its registration, as seen."""

from __future__ import annotations

from collections.abc import Iterable

from cluster.sizing.snapshot import Counts, Worker
from protocol.roles import ROLES, Role

_WEIGHT = 0.3  # of the newest in the average
_LONGEST_S = 3600.0  # what was asked for so long ago has not come


class Starts:
    """``seconds``: the average, or ``assumed_s`` until a worker has come that was asked for.

    Who comes is taken for the one that was asked for first. One that replaces a dead worker while
    another is awaited is taken for that one, too: it started the same way."""

    def __init__(self, assumed_s: float) -> None:
        self.seconds = assumed_s
        self._seen = False
        self._known: set[str] | None = None  # instances; None: nobody has looked yet
        self._asked: dict[Role, list[float]] = {role: [] for role in ROLES}

    def asked(self, before: Counts, after: Counts, at_s: float) -> None:
        """Other numbers of workers were asked for, by home."""
        for role in ROLES:
            more, waits = after.of(role) - before.of(role), self._asked[role]
            if more > 0:
                waits += [at_s] * more
            elif more < 0:
                del waits[max(0, len(waits) + more) :]  # the last to be asked for

    def look(self, workers: Iterable[Worker], at_s: float) -> None:
        """Who is there now."""
        there = {worker.instance: worker.home for worker in workers}
        new = there.keys() - self._known if self._known is not None else set()
        self._known = set(there) if self._known is None else self._known | set(there)
        for role, waits in self._asked.items():
            while waits and at_s - waits[0] > _LONGEST_S:
                del waits[0]
            for _ in [instance for instance in new if there[instance] == role]:
                if waits:
                    self._took(at_s - waits.pop(0))

    def _took(self, seconds: float) -> None:
        first, self._seen = not self._seen, True
        self.seconds = seconds if first else self.seconds + _WEIGHT * (seconds - self.seconds)
