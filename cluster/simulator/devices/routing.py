"""Where a request goes: the product's policy, admission and learning on what routers know here.

Of many workers only those are made states for the policy that it would look at closely itself
(``choose.py``: preselected); the result is that of showing it all of them, but for whom a
prefix is fetched from where several hold as much of it.
"""

from __future__ import annotations

import heapq
from random import Random
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cluster.simulator.devices.cache import BLOCK
from cluster.simulator.devices.clock import Clock
from cluster.simulator.devices.job import Job
from cluster.simulator.devices.network import Network
from cluster.simulator.devices.worker import Worker
from router.placement.admission import Patience
from router.placement.choose import WIDTH, Choice
from router.placement.cost import Placement
from router.placement.learned import Learned
from router.placement.policies import PolicyName, policy
from router.placement.prefix_index import PrefixIndex
from router.placement.snapshot import DecodeState, Objectives, PrefillState, Query, Snapshot

# MERGED cluster.simulate.books
# What routers know of loads: one array for each figure, by the number of a worker.
#
# The rules are those of ``router/placement/ledger.py`` for one router and one class of requests;
# arrays, so
# that a thousand workers are looked through at once.

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


class Pool:
    """Workers that take requests, in the order in which they came."""

    def __init__(self, workers: list[Worker]) -> None:
        self.workers = workers
        self.numbers: Ints = np.array([w.number for w in workers], np.int64)
        self.places = {w.name: place for place, w in enumerate(workers)}

    def named(self, name: str) -> Worker:
        return self.workers[self.places[name]]


class Terms(NamedTuple):
    """What does not change while it runs."""

    goals: Objectives
    patience: Patience
    policy: PolicyName
    kv_bytes: float  # of one token on the wire


class Router:
    def __init__(
        self, clock: Clock, terms: Terms, network: Network, index: PrefixIndex, chance: Random
    ) -> None:
        self.terms = terms
        self.learned = Learned()
        self.looks_at_all = terms.policy != "cost"
        self.books = Books()
        self.prefill = Pool([])
        self.decode = Pool([])
        self._clock = clock
        self._network = network
        self._index = index
        self._policy = policy(terms.policy, chance)

    def told(self, workers: list[Worker]) -> None:
        """Who there is now."""
        for worker in workers:
            self.books.room_for(worker.number)
        able = [w for w in workers if w.standing == "serving"]
        self.prefill = Pool([w for w in able if w.role == "prefill"])
        self.decode = Pool([w for w in able if w.role == "decode"])

    def choose(self, job: Job) -> Choice | None:
        """None when there is no decode worker."""
        query = Query(job.context, max(2.0, self.learned.output), self.terms.kv_bytes)
        held = self._index.match(job.blocks) if job.blocks else {}
        queues = self.books.queue_s(self.prefill.numbers, self._clock.now)
        batches = self.books.batch[self.decode.numbers]
        snapshot = Snapshot(
            self._prefill(self._near(self.prefill, queues, held), queues, held),
            self._decode(self._near(self.decode, batches, held), held),
            self.learned.network(self._network.active),
            self.learned.output,
        )
        return self._policy(query, snapshot, self.terms.goals)

    # ---- who is looked at -------------------------------------------------------------------

    def _near(self, pool: Pool, loads: Floats | Ints, held: dict[str, int]) -> list[int]:
        """Places of those that the policy would look at closely, in its order."""
        if len(pool.workers) <= WIDTH or self.looks_at_all:
            return list(range(len(pool.workers)))
        near = _holders(pool, loads, held) if held else []
        by_load: list[int] = np.argsort(loads, kind="stable")[:WIDTH].tolist()
        return (near + [at for at in by_load if at not in near])[:WIDTH]

    def _prefill(self, near: list[int], queues: Floats, held: dict[str, int]) -> list[PrefillState]:
        return [self._state(self.prefill.workers[at], float(queues[at]), held) for at in near]

    def _state(self, worker: Worker, queue_s: float, held: dict[str, int]) -> PrefillState:
        cached = held.get(worker.name, 0) * BLOCK
        correction = self.learned.correction(worker.name)
        chunk = worker.machine.chunk
        return PrefillState(worker.name, worker.model, chunk, queue_s, correction, cached)

    def _decode(self, near: list[int], held: dict[str, int]) -> list[DecodeState]:
        books, numbers = self.books, self.decode.numbers[near]
        queues = books.queue_s(numbers, self._clock.now).tolist()
        batches, pending = books.batch[numbers].tolist(), books.pending[numbers].tolist()
        found = []
        for at, queue_s, batch, due in zip(near, queues, batches, pending, strict=True):
            worker = self.decode.workers[at]
            total = worker.machine.kv_tokens
            found.append(
                DecodeState(
                    *(self._state(worker, queue_s, held), batch, worker.machine.max_batch),
                    *(min(worker.used, total), max(0, total - worker.used - due), total),
                    worker.batch.pace,
                )
            )
        return found

    # ---- the books --------------------------------------------------------------------------

    def enter(self, job: Job, chosen: Placement) -> None:
        assert job.d is not None
        job.promised = (
            chosen.p.prefill_s,
            int(job.context + max(2.0, self.learned.output)) - chosen.d.cached,
        )
        job.predicted_s = chosen.ttft_s / chosen.p.correction
        self.books.open(job, (job.p or job.d).number, job.d.number, self._clock.now)

    def first_token(self, job: Job, observed_s: float | None = None) -> None:
        """The prompt is computed, or (None) given up."""
        assert job.d is not None
        computing = job.p or job.d
        self.books.first_token(job, computing.number, job.d.number, self._clock.now)
        if observed_s is not None:
            self.learned.first_token(computing.name, job.predicted_s, observed_s)


def _holders(pool: Pool, loads: Floats | Ints, held: dict[str, int]) -> list[int]:
    """Half of those to look at: by overlap, and the less loaded of those with as much."""
    places = pool.places
    found = ((-n, loads[at], at) for name, n in held.items() if (at := places.get(name, -1)) >= 0)
    return [at for _, _, at in heapq.nsmallest(WIDTH // 2, found)]
