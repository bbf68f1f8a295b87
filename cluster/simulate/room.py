"""A worker's pool of KV: what live sequences hold of it; the rest is cache."""

from __future__ import annotations

from cluster.simulate.cache import BLOCK, Cache
from cluster.simulate.job import Job


class Room:
    """``jobs``: all that have to do with the worker, and the tokens that they hold. ``tokens``: of
    the pool; 0: without bound."""

    def __init__(self, tokens: int, cache: Cache) -> None:
        self.jobs: dict[Job, int] = {}
        self.used = 0
        self.cache = cache
        self._tokens = tokens

    def fits(self, tokens: int) -> bool:
        """One alone always does: what is too long for a pool is refused before."""
        return not self.used or not self._tokens or self.used + tokens <= self._tokens

    def take(self, job: Job, tokens: int) -> None:
        self.jobs[job] = tokens
        self.used += tokens
        self.cache.take(tokens - min(tokens, len(job.blocks) * BLOCK))

    def give_back(self, job: Job) -> bool:
        """The job has nothing to do with the worker any more. Whether that freed anything."""
        tokens = self.jobs.pop(job, 0)
        if tokens:
            self.used -= tokens
            self.cache.take(min(tokens, len(job.blocks) * BLOCK) - tokens)
        return tokens > 0
