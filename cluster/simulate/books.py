"""What routers know of loads: one array for each figure, by the number of a worker.

The rules are those of ``router/ledger.py`` for one router and one class of requests; arrays, so
that a thousand workers are looked through at once.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cluster.simulate.job import Job

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Books:
    """``batch``: requests at a decode worker; ``pending``: KV tokens due there before the first
    token."""

    def __init__(self) -> None:
        self._seconds: Floats = np.zeros(64)
        self._requests: Ints = np.zeros(64, np.int64)
        self._since: Floats = np.zeros(64)
        self.batch: Ints = np.zeros(64, np.int64)
        self.pending: Ints = np.zeros(64, np.int64)

    def room_for(self, number: int) -> None:
        """A worker of this number may be named from now on."""
        if number >= len(self.batch):
            more = len(self.batch)
            self._seconds, self._since = (
                np.concatenate([of, np.zeros(more)]) for of in (self._seconds, self._since)
            )
            self._requests, self.batch, self.pending = (
                np.concatenate([of, np.zeros(more, np.int64)])
                for of in (self._requests, self.batch, self.pending)
            )

    def queue_s(self, numbers: Ints, now: float) -> Floats:
        """Predicted seconds of prompts that wait at each of these. That under way is taken to be as
        far as its time."""
        seconds, requests = self._seconds[numbers], self._requests[numbers]
        under_way = np.minimum(seconds / np.maximum(requests, 1), now - self._since[numbers])
        found: Floats = np.maximum(seconds - under_way, 0.0)
        return found

    def open(self, job: Job, computing: int, decode: int, now: float) -> None:
        """``job.promised``: seconds at who computes, KV tokens at the decode worker."""
        seconds, kv_tokens = job.promised
        if not self._requests[computing]:
            self._since[computing] = now
        self._requests[computing] += 1
        self._seconds[computing] += seconds
        self.pending[decode] += kv_tokens
        self.batch[decode] += 1

    def first_token(self, job: Job, computing: int, decode: int, now: float) -> None:
        """The prompt is computed, or given up."""
        seconds, kv_tokens = job.promised
        self._requests[computing] -= 1
        left = self._seconds[computing] - seconds if self._requests[computing] else 0.0
        self._seconds[computing] = left
        self._since[computing] = now
        self.pending[decode] -= kv_tokens

    def close(self, decode: int) -> None:
        self.batch[decode] -= 1
