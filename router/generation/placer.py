"""``Placer`` chooses the workers of a request from what the router knows now.

    pool (workers, load) + index (cached blocks) + ledger (own work) + estimates (links, outputs)
        --PlacementSnapshot--> choose_placement --PlacementChoice--> ticket, Submit message

Called by ``ChoiceStream`` and ``Submission``.
"""

from __future__ import annotations

import random
import time
from collections.abc import Collection, Sequence
from typing import NamedTuple

from protocol.block_keys import BLOCK_TOKENS
from protocol.performance.step_model import DEFAULT_CHUNK
from protocol.registry.directory import WorkerRecord
from protocol.requests import Request, request_to_wire
from protocol.wire import wire_pb2 as pb
from router.placement.choose import PlacementChoice, choose_placement
from router.placement.cost import Placement
from router.placement.estimates import RoutingEstimates
from router.placement.ledger import AHEAD_LEVEL, PlacementTicket, WorkLedger
from router.placement.prefix_index import PrefixIndex
from router.placement.snapshot import (
    DecodeState,
    Objectives,
    PlacementQuery,
    PlacementSnapshot,
    PrefillState,
    PrefixFetch,
)
from router.workers.decode_link import DecodeLink
from router.workers.pool import WorkerPool


class PlacedRequest(NamedTuple):
    """A request's workers, chosen but not yet used."""

    link: DecodeLink
    choice: PlacementChoice
    query: PlacementQuery
    seconds: float  # duration of the decision
    batched_s: float  # of the prompts queued at P, if they share steps
    level: float  # its priority in the ledger


class Placer:
    """Places the requests of one router. Created with the router, holds no state of its own."""

    def __init__(
        self,
        pool: WorkerPool,
        index: PrefixIndex,
        ledger: WorkLedger,
        estimates: RoutingEstimates,
        goals: Objectives,
    ) -> None:
        self.estimates = estimates
        self._pool = pool
        self._index = index
        self._ledger = ledger
        self._goals = goals
        # Each router has its own generator, so that routers break ties differently.
        self._rng = random.Random(random.SystemRandom().getrandbits(64))

    def place(
        self,
        request: Request,
        keys: Sequence[bytes],
        avoid: Collection[str] = (),
        *,
        ahead: bool = False,
    ) -> PlacedRequest | None:
        """Return the request's workers; None when no decode worker is attached.

        ``keys``: block keys of the prompt. A decode worker in ``avoid`` (it failed this request) is
        used only when there is no other. ``ahead``: it goes ahead of its class.
        """
        began = time.perf_counter()
        query = self._query(request)
        level = request.priority - AHEAD_LEVEL if ahead else request.priority
        snapshot = self._snapshot(level, self._index.match(keys), avoid)
        choice = choose_placement(query, snapshot, self._goals, self._rng)
        if choice is None:
            return None
        link = self._pool.links[choice.chosen.decode]
        batched_s = self._batched_s(choice.chosen.p.instance)
        return PlacedRequest(link, choice, query, time.perf_counter() - began, batched_s, level)

    def open_ticket(self, placed: PlacedRequest) -> PlacementTicket:
        """Enter the work into the ledger. The caller releases the ticket."""
        chosen, query = placed.choice.chosen, placed.query
        return self._ledger.open(
            *(chosen.prefill, chosen.decode),
            tokens=query.tokens - chosen.p.cached,
            seconds=chosen.p.prefill_s,
            kv_tokens=int(query.tokens + query.output) - chosen.d.cached,
            priority=placed.level,
        )

    def submit_message(self, placed: PlacedRequest, request: Request) -> pb.Submit:
        """Return the message that submits the request to its decode worker."""
        choice = placed.choice
        submit = pb.Submit(request=request_to_wire(request))
        submit.has_alternative = self._pool.serves_beside(placed.link)
        chosen = choice.chosen
        if chosen.prefill is None:
            if chosen.p.fetch is not None:
                self._set_fetch(submit.fetch, chosen.p.fetch)
            return submit
        for candidate in (chosen, *choice.others):
            self._add_candidate(submit, candidate)
        # The decode worker computes the prompt itself only if all but one block is cached by then.
        missing = placed.query.tokens - chosen.d.cached
        submit.local_prefill_tokens = min(BLOCK_TOKENS, missing - 1)
        return submit

    def _batched_s(self, instance: str) -> float:
        """Return the seconds of the prompts queued at a worker, all of them in full steps."""
        queue, record = self._ledger.queues.get(instance), self._pool.record(instance)
        if queue is None or record is None:
            return 0.0
        chunk = record.prefill_chunk or DEFAULT_CHUNK
        model = self._pool.step_model(instance)
        return model.prefill_s(0, queue.tokens + queue.others, chunk)

    def _add_candidate(self, submit: pb.Submit, placement: Placement) -> None:
        record = self._pool.prefill.get(placement.prefill or "")
        if record is not None:
            candidate = submit.prefill.add()
            candidate.instance = record.instance
            candidate.endpoint = record.endpoint
            candidate.kv_endpoint = record.kv_endpoint
            if placement.p.fetch is not None:
                self._set_fetch(candidate.fetch, placement.p.fetch)

    def _set_fetch(self, message: pb.Fetch, fetch: PrefixFetch) -> None:
        record = self._pool.record(fetch.source)
        if record is not None:
            message.instance = record.instance
            message.endpoint = record.endpoint
            message.kv_endpoint = record.kv_endpoint
            message.blocks = fetch.tokens // BLOCK_TOKENS

    # ---- Snapshot ---------------------------------------------------------------------------

    def _query(self, request: Request) -> PlacementQuery:
        tokens = len(request.context)
        left = request.length_limit - tokens
        expected = left if request.sampling.ignore_eos else min(left, self.estimates.output)
        model = self._pool.model
        nominal = model.kv_bytes_per_token if model else 0
        return PlacementQuery(tokens, max(2.0, expected), self.estimates.kv_bytes(nominal))

    def _snapshot(
        self, priority: float, matches: dict[str, int], avoid: Collection[str]
    ) -> PlacementSnapshot:
        prefill = [
            self._prefill_state(record, priority, matches)
            for record in self._pool.prefill.values()
            if not record.draining
        ]
        ready = [link for link in self._pool.links.values() if link.ready]
        able = [link for link in ready if not link.down] or ready
        fresh = [link for link in able if link.record.instance not in avoid]
        decode = [self._decode_state(link, priority, matches) for link in fresh or able]
        network = self.estimates.network(self._ledger.active)
        return PlacementSnapshot(prefill, decode, network, self.estimates.output)

    def _prefill_state(
        self, record: WorkerRecord, priority: float, matches: dict[str, int]
    ) -> PrefillState:
        instance = record.instance
        model = self._pool.step_model(instance)
        chunk = record.prefill_chunk or DEFAULT_CHUNK
        queue = self._ledger.queues.get(instance)
        queue_s = 0.0
        if queue is not None:
            queue_s = queue.seconds(priority)
            if queue.others:
                queue_s += queue.others_s(model.prefill_s(0, queue.others, chunk))
        cached = matches.get(instance, 0) * BLOCK_TOKENS
        correction = self.estimates.correction(instance)
        return PrefillState(instance, model, chunk, queue_s, correction, cached)

    def _decode_state(
        self, link: DecodeLink, priority: float, matches: dict[str, int]
    ) -> DecodeState:
        record = link.record
        load = link.load()
        free = max(0, load.kv_free - self._ledger.pending_kv.get(record.instance, 0))
        return DecodeState(
            self._prefill_state(record, priority, matches),
            load.requests,
            record.max_batch,
            load.kv_total - load.kv_free,
            free,
            load.kv_total,
            load.pace,
        )
