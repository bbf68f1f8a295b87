"""``Placer`` chooses the workers of a request from what the router knows now.

    pool (workers, load) + index (cached blocks) + ledger (own work) + estimates (links, outputs)
        --PlacementSnapshot--> choose_placement --PlacementChoice--> ticket, Submit message

Called by ``ChoiceTurn``, ``ChoiceStream`` (for other attempts) and ``Submission``.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple, TypeAlias

from protocol.block_keys import BLOCK_TOKENS
from protocol.performance.step_model import DEFAULT_CHUNK, is_short_prompt
from protocol.registry.directory import WorkerRecord
from protocol.requests import Request, request_digest, request_to_wire
from protocol.wire import wire_pb2 as pb
from router.placement.choose import PlacementChoice, choose_placement
from router.placement.cost import Placement, queued_prompts_s, usable_tokens
from router.placement.estimates import RoutingEstimates
from router.placement.expected_prefixes import ExpectedPrefix, find_prefixes
from router.placement.ledger import (
    AHEAD_LEVEL,
    PlacementTicket,
    WorkLedger,
    queue_times,
    short_level,
)
from router.placement.prefix_index import PrefixIndex
from router.placement.snapshot import (
    DecodeState,
    Objectives,
    PlacementQuery,
    PlacementSnapshot,
    PrefillState,
    PrefixFetch,
    RequestOrigin,
)
from router.workers.decode_link import DecodeLink
from router.workers.pool import WorkerPool

AwaitingEach: TypeAlias = Callable[[Collection[str], int], Callable[[str], float]]
"""``FairQueue.awaiting_each``."""

UNKNOWN_ORIGIN = RequestOrigin()


class PlacementView(NamedTuple):
    """What all states of one decision are built from. The prefixes of the prompt are in blocks, by
    instance."""

    level: float  # priority in the ledger, of a prompt that is not short
    tokens: int  # of the prompt, with those already emitted
    cached: dict[str, int]
    coming: dict[str, tuple[int, ExpectedPrefix]]  # as of ``PromptPrefixes``
    busy: dict[str, set[str]]  # engines that have work, by host

    def neighbours(self, record: WorkerRecord) -> int:
        """Return how many engines besides the worker's own are busy on its host."""
        on_host = self.busy.get(host_of(record), ())
        return len(on_host) - (record.instance in on_host)


def prefill_chunk(record: WorkerRecord) -> int:
    """Return the prompt tokens of a worker's step."""
    return record.prefill_chunk or DEFAULT_CHUNK


def host_of(record: WorkerRecord) -> str:
    return record.endpoint.rpartition(":")[0]


class PlacedRequest(NamedTuple):
    """A request's workers, chosen but not yet used."""

    link: DecodeLink
    choice: PlacementChoice
    query: PlacementQuery
    seconds: float  # duration of the decision
    batched_s: float  # of the prompts queued at P, if they share steps
    level: float  # its priority in the ledger
    session: bytes  # its RequestOrigin's
    keys: Sequence[bytes]  # of the prompt's blocks
    neighbours: int  # busy engines beside the one that computes the prompt


class Placer:
    """Places the requests of one router. Created with the router, holds no state of its own.

    ``announce`` is told each prompt that is sent, the predicted seconds to its first token, and the
    digest of the request's id. ``awaiting_each`` is that of the router's ``FairQueue``."""

    def __init__(
        self,
        pool: WorkerPool,
        index: PrefixIndex,
        ledger: WorkLedger,
        estimates: RoutingEstimates,
        goals: Objectives,
    ) -> None:
        self.announce: Callable[[ExpectedPrefix, float, int], None] = lambda *_: None
        self.awaiting_each: AwaitingEach = lambda *_: lambda _instance: 0.0
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
        origin: RequestOrigin = UNKNOWN_ORIGIN,
        *,
        ahead: bool = False,
    ) -> PlacedRequest | None:
        """Return the request's workers; None when no decode worker is attached.

        ``keys``: block keys of the prompt. A decode worker in ``avoid`` (it failed this request) is
        used only when there is no other. ``ahead``: it goes ahead of its class.
        """
        began = time.perf_counter()
        query = self._query(request, origin)
        level = request.priority - AHEAD_LEVEL if ahead else request.priority
        view = self._view(keys, level, query.tokens)
        snapshot = self._snapshot(view, avoid)
        choice = choose_placement(query, snapshot, self._goals, self._rng)
        if choice is None:
            return None
        link = self._pool.links[choice.chosen.decode]
        computing = self._pool.record(choice.chosen.p.instance) or link.record
        level = short_level(level) if choice.chosen.p.is_short else level
        batched_s = self._batched_s(computing, view)
        seconds = time.perf_counter() - began
        return PlacedRequest(
            *(link, choice, query, seconds, batched_s, level, origin.session, keys),
            view.neighbours(computing),
        )

    def open_ticket(self, placed: PlacedRequest, request_id: str) -> PlacementTicket:
        """Enter the work into the ledger. The caller releases the ticket."""
        digest = request_digest(request_id)
        chosen, query = placed.choice.chosen, placed.query
        workers = (chosen.p.instance, chosen.decode)
        self.estimates.sessions.record(placed.session, workers)
        ticket = self._ledger.open(
            *(chosen.prefill, chosen.decode),
            tokens=query.tokens - chosen.p.cached,
            seconds=chosen.p.prefill_s,
            kv_tokens=int(query.tokens + query.output) - chosen.d.cached,
            priority=placed.level,
            # An engine lets a sibling wait for a prompt that it computes, not for one on its way.
            keys=() if chosen.p.fetch is not None else placed.keys,
            digest=digest,
        )
        self.announce(ticket.prefix, chosen.ttft_s, digest)
        return ticket

    def submit_message(self, placed: PlacedRequest, request: Request) -> pb.Submit:
        """Return the message that submits the request to its decode worker."""
        choice = placed.choice
        submit = pb.Submit()
        request_to_wire(request, submit.request)  # a copy would take as long as the writing
        submit.has_alternative = self._pool.serves_beside(placed.link)
        chosen = choice.chosen
        here = chosen.p if chosen.prefill is None else chosen.d
        submit.uncached_tokens = placed.query.tokens - here.cached
        if chosen.prefill is None:
            if chosen.p.fetch is not None:
                self._set_fetch(submit.fetch, chosen.p.fetch)
            return submit
        for candidate in (chosen, *choice.others):
            self._add_candidate(submit, candidate, placed.query.tokens - candidate.p.cached)
        # The decode worker computes the prompt itself only if all but one block is cached by then.
        missing = placed.query.tokens - chosen.d.cached
        submit.local_prefill_tokens = min(BLOCK_TOKENS, missing - 1)
        return submit

    def _batched_s(self, record: WorkerRecord, view: PlacementView) -> float:
        """Return the seconds of the prompts queued at a worker, all of them in full steps, less the
        one whose prefix this request will share: it waits for that one in any case."""
        instance = record.instance
        queue = self._ledger.queues.get(instance)
        if queue is None:
            return 0.0
        queued = queue.beside(view.coming[instance][1] if instance in view.coming else None)
        chunk, model = prefill_chunk(record), self._pool.step_model(instance)
        return queued_prompts_s(model, queued.tokens, queued.prompts, chunk)

    def _add_candidate(self, submit: pb.Submit, placement: Placement, tokens: int) -> None:
        record = self._pool.prefill.get(placement.prefill or "")
        if record is not None:
            candidate = submit.prefill.add()
            candidate.instance = record.instance
            candidate.endpoint = record.endpoint
            candidate.kv_endpoint = record.kv_endpoint
            candidate.uncached_tokens = tokens
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

    def _query(self, request: Request, origin: RequestOrigin) -> PlacementQuery:
        tokens, sampling = len(request.context), request.sampling
        left = request.length_limit - tokens
        expected = float(left)
        if not sampling.ignore_eos:
            learned = self.estimates.outputs.expected(origin.tenant, sampling.max_tokens)
            expected = min(left, max(learned, sampling.min_tokens - len(request.emitted)))
        model = self._pool.model
        nominal = model.kv_bytes_per_token if model else 0
        kv_bytes = self.estimates.kv_bytes(nominal)
        familiar = self.estimates.sessions.find(origin.session) if origin.session else ()
        return PlacementQuery(tokens, max(2.0, expected), kv_bytes, familiar)

    def _view(self, keys: Sequence[bytes], level: float, tokens: int) -> PlacementView:
        """Look up the prompt and the busy engines."""
        found = find_prefixes(self._index.match(keys), self._ledger.expected, keys, level)
        return PlacementView(level, tokens, *found, self._busy_engines())

    def _busy_engines(self) -> dict[str, set[str]]:
        busy: dict[str, set[str]] = {}
        for record in self._pool.prefill.values():
            queue = self._ledger.queues.get(record.instance)
            if queue is not None and (queue.requests or queue.others):
                busy.setdefault(host_of(record), set()).add(record.instance)
        for link in self._pool.links.values():
            if link.busy:
                busy.setdefault(host_of(link.record), set()).add(link.record.instance)
        return busy

    def _snapshot(self, view: PlacementView, avoid: Collection[str]) -> PlacementSnapshot:
        routers = self._pool.routers
        serving = {i: r for i, r in self._pool.prefill.items() if not r.draining}
        awaiting = self.awaiting_each(serving.keys(), routers)
        prefill = [self._prefill_state(record, view, awaiting) for record in serving.values()]
        ready = [link for link in self._pool.links.values() if link.ready]
        able = [link for link in ready if not link.down] or ready
        fresh = [link for link in able if link.record.instance not in avoid]
        awaiting = self.awaiting_each({link.record.instance for link in able}, routers)
        decode = [self._decode_state(link, view, awaiting) for link in fresh or able]
        network = self.estimates.network(self._ledger.active)
        return PlacementSnapshot(prefill, decode, network, self.estimates.outputs.mean)

    def _prefill_state(
        self, record: WorkerRecord, view: PlacementView, awaiting: Callable[[str], float]
    ) -> PrefillState:
        instance = record.instance
        model = self._pool.step_model(instance)
        chunk = prefill_chunk(record)
        cached = view.cached.get(instance, 0) * BLOCK_TOKENS
        coming = view.coming[instance][0] * BLOCK_TOKENS if instance in view.coming else 0
        correction = self.estimates.correction(instance, view.neighbours(record))
        queue = self._ledger.queues.get(instance)
        missing = view.tokens - usable_tokens(cached, view.tokens)
        is_short = is_short_prompt(missing, chunk) and not coming  # which it would wait for
        queue_s = beside_s = 0.0
        if queue is not None and (queue.requests or queue.others):
            queue_s, beside_s = queue_times(queue, model, chunk, view.level, is_short=is_short)
        known = (instance, model, chunk, queue_s, correction, cached, coming)
        return PrefillState(*known, is_short, beside_s, awaiting(instance))

    def _decode_state(
        self, link: DecodeLink, view: PlacementView, awaiting: Callable[[str], float]
    ) -> DecodeState:
        record = link.record
        load = link.load()
        pending = self._ledger.pending_kv.get(record.instance, 0)
        free, unused = (max(0, tokens - pending) for tokens in (load.kv_free, load.kv_unused))
        return DecodeState(
            self._prefill_state(record, view, awaiting),
            load.requests,
            record.max_batch,
            load.kv_total - load.kv_free,
            free,
            load.kv_total,
            load.speculation,
            unused,
        )
