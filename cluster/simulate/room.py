"""A worker's pool of KV: what live sequences hold, and who waits for room; the rest is cache."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from cluster.simulate.cache import BLOCK, Cache
from cluster.simulate.job import Job


class Room:
    """``jobs``: all that have to do with the worker, and the tokens that they hold. ``tokens``: of
    the pool; 0: without bound. ``reserved`` is told who has room, in the order in which they
    asked."""

    def __init__(self, tokens: int, cache: Cache, reserved: Callable[[Job], None]) -> None:
        self.jobs: dict[Job, int] = {}
        self.used = 0
        self.cache = cache
        self._tokens = tokens
        self._reserved = reserved
        self._waiting: deque[Job] = deque()

    def fits(self, tokens: int) -> bool:
        """One alone always does: what is too long for a pool is refused before."""
        return not self.used or not self._tokens or self.used + tokens <= self._tokens

    def take(self, job: Job, tokens: int) -> None:
        self.jobs[job] = tokens
        self.used += tokens
        self.cache.take(tokens - min(tokens, len(job.blocks) * BLOCK))

    def give_back(self, job: Job) -> bool:
        """The job has nothing to do with the worker any more. Whether that freed anything: then
        those that waited have it."""
        tokens = self.jobs.pop(job, 0)
        if not tokens:
            return False
        self.used -= tokens
        self.cache.take(min(tokens, len(job.blocks) * BLOCK) - tokens)
        while self._waiting and self.fits(self._waiting[0].need):
            self._reserve(self._waiting.popleft())
        return True

    def reserve(self, job: Job) -> None:
        """All that it will hold, now or later."""
        if not self._waiting and self.fits(job.need):
            self._reserve(job)
        else:
            self._waiting.append(job)

    def _reserve(self, job: Job) -> None:
        self.take(job, job.need)
        self._reserved(job)

    def forget(self, job: Job) -> None:
        """It waits for no room any more."""
        if job in self._waiting:
            self._waiting.remove(job)
