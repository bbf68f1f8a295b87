"""Where a request goes: the product's policy, admission and learning on what routers know here.

Of many workers only those are made states for the policy that it would look at closely itself
(``router/choose.py``: preselected); the result is that of showing it all of them, but for whom a
prefix is fetched from where several hold as much of it.
"""

from __future__ import annotations

import heapq
from random import Random
from typing import NamedTuple

import numpy as np

from cluster.simulate.books import Books, Floats, Ints
from cluster.simulate.cache import BLOCK
from cluster.simulate.clock import Clock
from cluster.simulate.job import Job
from cluster.simulate.network import Network
from cluster.simulate.worker import Worker
from router.admission import Patience
from router.choose import WIDTH, Choice
from router.index import PrefixIndex
from router.learned import Learned
from router.policies import PolicyName, policy
from router.snapshot import DecodeState, Objectives, PrefillState, Query, Snapshot
from router.terms import Placement


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
