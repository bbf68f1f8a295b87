"""A router of a simulated cluster: the product's policy, ledger and estimates.

For a pool of many workers, states are built only for those that the policy preselects anyway
(``router/placement/choose.py``). The result is that of passing all of them, except for which peer
a prefix is fetched from when several hold equally much of it.

The ledger is ``router/placement/ledger.py``, with one priority.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from random import Random
from typing import NamedTuple

from cluster.simulator.devices.cache import CACHE_BLOCK_TOKENS
from cluster.simulator.devices.clock import SimulatedClock
from cluster.simulator.devices.request import SimulatedRequest
from cluster.simulator.devices.router_queue import PRIORITY, RouterQueue
from cluster.simulator.devices.worker import SimulatedWorker
from protocol.performance.step_model import is_short_prompt
from router.fairness.fair_queue import RoutedWork
from router.fairness.virtual_counters import ExpectedCost
from router.placement.admission import AdmissionLimits
from router.placement.choose import (
    PlacementChoice,
    PreselectionRank,
    choose_placement,
    decode_rank,
    preselect_workers,
)
from router.placement.cost import Placement, queued_prompts_s, usable_tokens
from router.placement.estimates import RoutingEstimates
from router.placement.expected_prefixes import (
    ExpectedPrefix,
    PromptPrefixes,
    find_prefixes,
    remembered_s,
)
from router.placement.ledger import DecodeLoad, WorkLedger, queue_times, short_level
from router.placement.prefix_index import PrefixIndex
from router.placement.snapshot import (
    DecodeState,
    Objectives,
    PlacementQuery,
    PlacementSnapshot,
    PrefillState,
)


class RoutablePool:
    """The workers of one role that accept requests, in the order in which they started."""

    def __init__(self, workers: list[SimulatedWorker], ledger: WorkLedger) -> None:
        self.workers = workers
        self.places = {w.name: place for place, w in enumerate(workers)}
        self._queues = [ledger.queue(w.name) for w in workers]

    def named(self, name: str) -> SimulatedWorker:
        return self.workers[self.places[name]]

    def queue_s(self) -> list[float]:
        """Return the predicted seconds of queued prompts at each worker."""
        return [
            queue_times(q, w.model, w.machine.chunk, PRIORITY)[0] if q.requests or q.others else 0.0
            for w, q in zip(self.workers, self._queues, strict=True)
        ]


class RoutingTerms(NamedTuple):
    """Settings that stay the same during a simulation."""

    goals: Objectives
    patience: AdmissionLimits
    kv_bytes: float  # of one token on the wire
    routers: int = 1


class SimulatedRouter:
    """Chooses workers for requests; the fleet calls ``update_workers`` when workers change, and the
    simulation ``take_report`` where routers know loads from reports alone."""

    def __init__(
        self, clock: SimulatedClock, terms: RoutingTerms, index: PrefixIndex, rng: Random
    ) -> None:
        self.terms = terms
        self.estimates = RoutingEstimates()
        self.ledger = WorkLedger(lambda: clock.now)
        self.others: Sequence[SimulatedRouter] = ()  # that it tells what it has sent
        self.in_decode: Counter[str] = Counter()  # requests placed on each decode worker
        self.prefill = RoutablePool([], self.ledger)
        self.decode = RoutablePool([], self.ledger)
        self._known: set[str] = set()
        self._reports: dict[str, DecodeLoad] = {}  # empty: it knows the workers' present loads
        self._index = index
        self._rng = rng
        self.queue = RouterQueue(clock, self.ledger, self.route, terms.goals.ttft_s, rng)

    def update_workers(self, workers: list[SimulatedWorker]) -> None:
        """Replace both pools by the ``workers`` that serve."""
        names = {w.name for w in workers}
        for gone in self._known - names:
            self.ledger.forget(gone)
            self._reports.pop(gone, None)
        self._known = names
        serving = [w for w in workers if w.state == "serving"]
        self.prefill = RoutablePool([w for w in serving if w.role == "prefill"], self.ledger)
        self.decode = RoutablePool([w for w in serving if w.role == "decode"], self.ledger)
        self.queue.share_workers(self.terms.routers, len(self.prefill.workers))

    def named(self, name: str) -> SimulatedWorker:
        """Return a worker of either pool that serves."""
        return (self.prefill if name in self.prefill.places else self.decode).named(name)

    def take_report(self, worker: SimulatedWorker) -> None:
        """Take the load that a worker reports, a part of which other routers have sent."""
        self.ledger.report(worker.name, *worker.reported_prompts)
        total, own = worker.machine.kv_tokens, self.in_decode[worker.name]
        free = max(0, total - worker.claimed_tokens)
        self._reports[worker.name] = DecodeLoad(
            *(own, worker.decoding, own, free, total), kv_unused=worker.unused_tokens
        )

    def route(self, request: SimulatedRequest) -> RoutedWork | None:
        """Return where a request would go now; None without a decode worker."""
        keys, expected = request.blocks, self.ledger.expected
        held = find_prefixes(self._index.match(keys), expected, keys, PRIORITY)
        choice = self._choose(request, held)
        if choice is None:
            return None
        chosen = choice.chosen
        cost = ExpectedCost(request.context - chosen.p.cached, self._expected_output)
        return RoutedWork(chosen, self._batched_s(chosen, held), cost)

    @property
    def _expected_output(self) -> float:
        return max(2.0, self.estimates.outputs.mean)

    def _batched_s(self, chosen: Placement, held: PromptPrefixes) -> float:
        """Return the seconds of the prompts queued at P, as ``Placer`` does."""
        worker = self.named(name := chosen.p.instance)
        prefix = held.coming[name][1] if name in held.coming else None
        queued, chunk = self.ledger.queue(name).beside(prefix), worker.machine.chunk
        return queued_prompts_s(worker.model, queued.tokens, queued.prompts, chunk)

    def _choose(self, request: SimulatedRequest, held: PromptPrefixes) -> PlacementChoice | None:
        """Return the product's choice of workers."""
        query = PlacementQuery(request.context, self._expected_output, self.terms.kv_bytes)
        queues = self.prefill.queue_s()

        def rank(place: int) -> PreselectionRank:
            return self._decode_rank(self.decode.workers[place], query, held)

        awaiting_p, awaiting_d = (
            self.queue.awaiting_each(pool.places.keys(), self.terms.routers)
            for pool in (self.prefill, self.decode)
        )
        tokens = request.context
        near_p = self._preselect(self.prefill, queues.__getitem__, held)
        near_d = self._preselect(self.decode, rank, held)
        snapshot = PlacementSnapshot(
            [self._prefill_state(worker, held, tokens, awaiting_p) for worker in near_p],
            [self._decode_state(worker, held, tokens, awaiting_d) for worker in near_d],
            self.estimates.network(self.ledger.active),
            self.estimates.outputs.mean,
        )
        return choose_placement(query, snapshot, self.terms.goals, self._rng)

    def _preselect(
        self, pool: RoutablePool, rank: Callable[[int], PreselectionRank], held: PromptPrefixes
    ) -> list[SimulatedWorker]:
        """Return the workers that the policy would look at closely, in its order. ``rank``: of the
        worker at a place."""
        blocks = held.cached | {name: blocks for name, (blocks, _) in held.coming.items()}
        reusable = [blocks.get(name, 0) for name in pool.places]
        near = preselect_workers(range(len(reusable)), reusable.__getitem__, rank)
        return [pool.workers[place] for place in near]

    def _prefill_state(
        self,
        worker: SimulatedWorker,
        held: PromptPrefixes,
        tokens: int,
        awaiting: Callable[[str], float],
    ) -> PrefillState:
        name, model, chunk = worker.name, worker.model, worker.machine.chunk
        cached = held.cached.get(name, 0) * CACHE_BLOCK_TOKENS
        coming = held.coming[name][0] * CACHE_BLOCK_TOKENS if name in held.coming else 0
        is_short = is_short_prompt(tokens - usable_tokens(cached, tokens), chunk) and not coming
        queue = self.ledger.queue(name)
        queue_s, beside_s = queue_times(queue, model, chunk, PRIORITY, is_short=is_short)
        known = (name, model, chunk, queue_s, self.estimates.correction(name), cached, coming)
        return PrefillState(*known, is_short, beside_s, awaiting(name))

    def _decode_state(
        self,
        worker: SimulatedWorker,
        held: PromptPrefixes,
        tokens: int,
        awaiting: Callable[[str], float],
    ) -> DecodeState:
        batch, used, free = self._decode_load(worker)
        return DecodeState(
            self._prefill_state(worker, held, tokens, awaiting),
            batch=batch,
            rows=worker.machine.max_batch,
            kv_used=used,
            kv_free=free,
            kv_total=worker.machine.kv_tokens,
            speculation=worker.machine.speculation,
            kv_unused=self._unused_kv(worker),
        )

    def _decode_rank(
        self, worker: SimulatedWorker, query: PlacementQuery, held: PromptPrefixes
    ) -> PreselectionRank:
        cached = held.cached.get(worker.name, 0) * CACHE_BLOCK_TOKENS
        batch, _, free = self._decode_load(worker)
        machine = worker.machine
        return decode_rank(query, cached, batch, machine.max_batch, free, machine.kv_tokens)

    def _decode_load(self, worker: SimulatedWorker) -> tuple[int, int, int]:
        """Return the requests in a decode worker, and the used and the free tokens of its KV. What
        a worker has promised counts as used; only a report may lack what was placed since then."""
        total, own = worker.machine.kv_tokens, self.in_decode[worker.name]
        report = self._reports.get(worker.name)
        if report is None:
            used = min(worker.claimed_tokens, total)
            return own, used, total - used
        used = total - report.kv_free
        free = max(0, report.kv_free - self.ledger.pending_kv[worker.name])
        return report._replace(own=own).requests, used, free

    def _unused_kv(self, worker: SimulatedWorker) -> int:
        """Return the tokens of its KV that no sequence holds or waits for."""
        report = self._reports.get(worker.name)
        if report is None:
            return worker.unused_tokens
        return max(0, report.kv_unused - self.ledger.pending_kv[worker.name])

    def record_placement(self, request: SimulatedRequest, chosen: Placement) -> None:
        """Count an attempt in the ledger until ``release``."""
        assert request.decode is not None
        request.decode.pool.promise(request)
        self.in_decode[request.decode.name] += 1
        request.predicted_s = chosen.ttft_s / chosen.p.correction
        tokens = request.expected = request.context - chosen.p.cached
        request.ticket = self.ledger.open(
            None if request.prefill is None else request.prefill.name,
            request.decode.name,
            tokens=tokens,
            seconds=chosen.p.prefill_s,
            kv_tokens=int(request.context + self._expected_output) - chosen.d.cached,
            priority=short_level(PRIORITY) if chosen.p.is_short else PRIORITY,
            keys=request.blocks if chosen.p.fetch is None else (),
        )
        for other in self.others:  # until a report, which has what was sent before
            other._hear_of(request.ticket.prefix, chosen.ttft_s, 1 + request.number)

    def _hear_of(self, prefix: ExpectedPrefix, seconds: float, digest: int) -> None:
        """Count a prompt that another router has sent, and know its prefix."""
        self.ledger.announce(prefix.instance, digest, prefix.tokens)
        if prefix.is_new:
            about = (prefix.tokens, prefix.level, prefix.first, remembered_s(seconds))
            self.ledger.expected.add_of_other(prefix.instance, prefix.keys, *about)

    def release(self, request: SimulatedRequest) -> None:
        """Forget an attempt that has ended."""
        assert request.decode is not None and request.ticket is not None
        request.ticket.release()
        self.in_decode[request.decode.name] -= 1

    def record_first_token(self, request: SimulatedRequest, observed_s: float) -> None:
        """Learn from the time to first token of a first attempt."""
        computing = request.prefill or request.decode
        assert computing is not None
        self.estimates.record_first_token(computing.name, request.predicted_s, observed_s)
