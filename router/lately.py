"""Prefill workers that the directory lists, and those that it did until a moment ago."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from protocol.directory import WorkerRecord

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
