"""From a request to its workers: what is known now, the policy's choice, and the books on it.

pool (who, load) + index (cached) + ledger (own work) + learned (links, outputs)
    --snapshot--> policy --choice--> ticket, and the message for the decode worker
"""

from __future__ import annotations

import random
import time
from collections.abc import Collection, Sequence
from typing import NamedTuple

from protocol.block_keys import BLOCK_TOKENS
from protocol.registry.directory import WorkerRecord
from protocol.requests import Request, to_wire
from protocol.wire import wire_pb2 as pb
from router.placement.choose import Choice
from router.placement.cost import Placement
from router.placement.learned import Learned
from router.placement.ledger import Ledger, Ticket
from router.placement.policies import PolicyName, policy
from router.placement.prefix_index import PrefixIndex
from router.placement.snapshot import DecodeState, Fetch, Objectives, PrefillState, Query, Snapshot
from router.placement.step_model import CHUNK
from router.workers.decode_link import DecodeLink
from router.workers.pool import Pool


class Placed(NamedTuple):
    """A decision, before it is acted on."""

    link: DecodeLink
    choice: Choice
    query: Query
    seconds: float  # that the decision took


class Placer:
    def __init__(
        self,
        pool: Pool,
        index: PrefixIndex,
        ledger: Ledger,
        learned: Learned,
        goals: Objectives,
        name: PolicyName,
    ) -> None:
        self.learned = learned
        self.name: PolicyName = name
        self._pool = pool
        self._index = index
        self._ledger = ledger
        self._goals = goals
        # A generator of its own for each router: equals are not equal for all of them alike.
        self._policy = policy(name, random.Random(random.SystemRandom().getrandbits(64)))

    def place(
        self, request: Request, keys: Sequence[bytes], avoid: Collection[str] = ()
    ) -> Placed | None:
        """Where the request should go; None when no decode worker is attached. A decode worker in
        ``avoid`` (it failed this very request) is taken only when there is no other. ``keys``: of
        the prompt's blocks."""
        began = time.perf_counter()
        query = self._query(request)
        snapshot = self._snapshot(request.priority, self._index.match(keys), avoid)
        choice = self._policy(query, snapshot, self._goals)
        if choice is None:
            return None
        link = self._pool.links[choice.chosen.decode]
        return Placed(link, choice, query, time.perf_counter() - began)

    def open(self, placed: Placed, priority: int) -> Ticket:
        """Enter it into the books. The caller releases the ticket."""
        chosen, query = placed.choice.chosen, placed.query
        return self._ledger.open(
            *(chosen.prefill, chosen.decode),
            tokens=query.tokens - chosen.p.cached,
            seconds=chosen.p.prefill_s,
            kv_tokens=int(query.tokens + query.output) - chosen.d.cached,
            priority=priority,
        )

    def message(self, placed: Placed, request: Request) -> pb.Submit:
        """What the decode worker is told."""
        choice = placed.choice
        submit = pb.Submit(request=to_wire(request))
        chosen = choice.chosen
        if chosen.prefill is None:
            if chosen.p.fetch is not None:
                self._set_fetch(submit.fetch, chosen.p.fetch)
            return submit
        for candidate in (chosen, *choice.others):
            self._add_candidate(submit, candidate)
        if self.name == "cost":
            # The choice stands, unless D turns out to lack next to nothing.
            missing = placed.query.tokens - chosen.d.cached
            submit.local_prefill_tokens = min(BLOCK_TOKENS, missing - 1)
        return submit

    def _add_candidate(self, submit: pb.Submit, placement: Placement) -> None:
        record = self._pool.prefill.get(placement.prefill or "")
        if record is not None:
            candidate = submit.prefill.add()
            candidate.instance = record.instance
            candidate.endpoint = record.endpoint
            candidate.kv_endpoint = record.kv_endpoint
            if placement.p.fetch is not None:
                self._set_fetch(candidate.fetch, placement.p.fetch)

    def _set_fetch(self, message: pb.Fetch, fetch: Fetch) -> None:
        record = self._pool.record(fetch.source)
        if record is not None:
            message.instance = record.instance
            message.endpoint = record.endpoint
            message.kv_endpoint = record.kv_endpoint
            message.blocks = fetch.tokens // BLOCK_TOKENS

    # ---- what is known ----------------------------------------------------------------------

    def _query(self, request: Request) -> Query:
        tokens = len(request.context)
        left = request.length_limit - tokens
        expected = left if request.sampling.ignore_eos else min(left, self.learned.output)
        model = self._pool.model
        nominal = model.kv_bytes_per_token if model else 0
        return Query(tokens, max(2.0, expected), self.learned.kv_bytes(nominal))

    def _snapshot(self, priority: int, matches: dict[str, int], avoid: Collection[str]) -> Snapshot:
        prefill = [
            self._computing(record, priority, matches)
            for record in self._pool.prefill.values()
            if not record.draining
        ]
        ready = [link for link in self._pool.links.values() if link.ready]
        able = [link for link in ready if not link.down] or ready
        fresh = [link for link in able if link.record.instance not in avoid]
        decode = [self._decoding(link, priority, matches) for link in fresh or able]
        network = self.learned.network(self._ledger.active)
        return Snapshot(prefill, decode, network, self.learned.output)

    def _computing(
        self, record: WorkerRecord, priority: int, matches: dict[str, int]
    ) -> PrefillState:
        instance = record.instance
        model = self._pool.step_model(instance)
        chunk = record.prefill_chunk or CHUNK
        queue = self._ledger.queues.get(instance)
        queue_s = 0.0
        if queue is not None:
            queue_s = queue.seconds(priority)
            if queue.others:
                queue_s += model.prefill_s(0, queue.others, chunk)
        cached = matches.get(instance, 0) * BLOCK_TOKENS
        correction = self.learned.correction(instance)
        return PrefillState(instance, model, chunk, queue_s, correction, cached)

    def _decoding(self, link: DecodeLink, priority: int, matches: dict[str, int]) -> DecodeState:
        record = link.record
        load = link.load()
        free = max(0, load.kv_free - self._ledger.pending_kv.get(record.instance, 0))
        return DecodeState(
            self._computing(record, priority, matches),
            load.requests,
            record.max_batch,
            load.kv_total - load.kv_free,
            free,
            load.kv_total,
            load.pace,
        )
