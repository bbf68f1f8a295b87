"""The product's parts of one router that choose workers, over simulated workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from random import Random

from bench.router.pooled_workers import CHUNK, KV_BYTES, LINK_BYTES_S, PooledWorker, PoolTurn
from cluster.simulator.devices.clock import SimulatedClock
from cluster.simulator.devices.router_queue import SimulatedTimer
from protocol.block_keys import BLOCK_TOKENS
from protocol.registry.directory import WorkerRecord
from protocol.requests import Request, request_digest
from protocol.sampling_params import SamplingParams
from protocol.wire import wire_pb2 as pb
from router.common.errors import ApiError
from router.fairness.dispatcher import FairDispatcher, TimerHandle, look_spread_s
from router.fairness.fair_queue import FairQueue
from router.fairness.overload import OverloadMonitor
from router.fairness.virtual_counters import VirtualCounters
from router.generation.choice_turn import ChoiceTurn, RequestEntry
from router.generation.placer import PlacedRequest, Placer
from router.http.state import WorkerTracker
from router.placement.admission import AdmissionLimits
from router.placement.estimates import RoutingEstimates
from router.placement.expected_prefixes import ExpectedPrefix
from router.placement.ledger import PlacementTicket, QueuedPrompts, WorkLedger
from router.placement.prefix_exchange import sent_prompt, take_sent
from router.placement.prefix_index import PrefixIndex
from router.placement.snapshot import Objectives, RequestOrigin
from router.tenants.tenant import Tenant
from router.workers.decode_link import DecodeLink
from router.workers.pool import WorkerPool

GOALS = Objectives(1.0, 0.03)
PATH_S = 0.002  # from a router to a worker, and from one worker to another
EXCHANGE_S = 0.004  # from a router by Redis to the others
TENANT = Tenant("t")
MAX_TOKENS = 1024


class _IgnoredOutputs:
    """The ``OutputSink`` of all requests: the router takes what it wants to know from workers."""

    def on_output(self, output: pb.Output) -> bool:
        return True

    def on_link_lost(self, reason: str, *, own_pause: bool) -> None:
        raise AssertionError(reason)


async def _no_workers() -> list[WorkerRecord]:
    return []


class PoolRouter:
    """One router. ``SharedPool`` creates it, sends it turns, and brings it loads."""

    def __init__(
        self, number: int, clock: SimulatedClock, workers: Mapping[str, PooledWorker]
    ) -> None:
        self.index, self.errors = PrefixIndex(), list[float]()
        self.submits_seen: Counter[str] = Counter()  # by the worker that has seen them
        self._clock, self._workers, self._ids = clock, workers, 0
        self._ledger, self._estimates = WorkLedger(lambda: clock.now), RoutingEstimates()
        self._tracker = WorkerTracker(self.index, self._ledger, self._estimates, None)
        self._pool = WorkerPool(
            _no_workers, model_id="m", token="", refresh_s=1.0, listener=self._tracker
        )
        self._placer = Placer(self._pool, self.index, self._ledger, self._estimates, GOALS)
        self._placer._rng = Random(f"router {number}")
        self._placer.announce = self._announce
        self.others: list[PoolRouter] = []
        self._number = number
        queue = FairQueue(VirtualCounters(lambda: clock.now))
        monitor = OverloadMonitor(queue, GOALS.ttft_s, lambda: clock.now)
        self._dispatcher = FairDispatcher(queue, monitor, lambda: clock.now, self._call_later)
        self._dispatcher.routers = lambda: self._pool.routers
        self._placer.awaiting_each = queue.awaiting_each
        self._ledger.on_less_work = self._dispatcher.wake
        self._ledger.on_report = self._dispatcher.look_soon
        self._dispatcher._rng = Random(f"looks {number}")
        self._dispatcher.spread_s = lambda: look_spread_s(
            self._pool.routers, len(self._pool.prefill)
        )
        for worker in workers.values():
            if worker.role == "decode":
                link = DecodeLink(worker.record(), "", lambda: None, self._pool._on_load)
                link.attached = True
                self._pool.links[worker.name] = link
                link.report(worker.load())

    def _call_later(self, delay_s: float, call: Callable[[], None]) -> TimerHandle:
        timer = SimulatedTimer(call)
        self._clock.at(self._clock.now + delay_s, timer.run)
        return timer

    def take_records(self, records: Mapping[str, WorkerRecord]) -> None:
        """Take what the directory has of the prefill workers."""
        before = self._pool.prefill
        self._pool.prefill = {r.instance: r for r in records.values() if r.role == "prefill"}
        self._pool.apply_records()
        for name, record in self._pool.prefill.items():
            if before.get(name) != record:
                self._tracker.on_load(name, QueuedPrompts.of(record), 0)

    def take_load(self, worker: PooledWorker, load: pb.Load) -> None:
        """Take what a worker pushes."""
        if worker.role == "decode":
            link = self._pool.links[worker.name]
            link.routers = 1 + len(self.others)
            link.report(load)
        else:
            self._tracker.on_load(worker.name, QueuedPrompts.of(load), 0)

    def serve(self, turn: PoolTurn) -> None:
        """Queue and place a turn that has just arrived."""
        turn.arrived = self._clock.now
        sampling = SamplingParams(max_tokens=MAX_TOKENS)
        request = Request(id="", prompt=(0,) * turn.tokens, sampling=sampling)
        limits = AdmissionLimits(10 * GOALS.ttft_s, lasting_queue_s=GOALS.ttft_s / 2)

        def refuse(error: ApiError) -> None:
            turn.is_refused = True

        choice = ChoiceTurn(
            *(self._dispatcher, self._placer, request, turn.keys[: turn.tokens // BLOCK_TOKENS]),
            *(TENANT, RequestOrigin(TENANT.name, turn.session)),
            lambda placed, older_s: self._submit(turn, placed),
            refuse,
        )
        try:
            choice.enter(self._clock.now, RequestEntry(limits))
        except ApiError as error:
            refuse(error)

    def _announce(self, prefix: ExpectedPrefix, seconds: float, digest: int) -> None:
        sent = sent_prompt(str(self._number), prefix, seconds, digest)
        for router in self.others:
            self._clock.at(self._clock.now + EXCHANGE_S, take_sent, router._ledger, sent)

    def _submit(self, turn: PoolTurn, placed: PlacedRequest) -> None:
        self._ids += 1
        turn.submitted = self._clock.now
        wire_id = f"{self._number}.{self._ids}"
        turn.digest = request_digest(wire_id)
        ticket = self._placer.open_ticket(placed, wire_id)
        placed.link.submit(pb.Submit(request=pb.Request(id=wire_id)), _IgnoredOutputs())
        placed.link._next_message()
        self._clock.at(turn.submitted + PATH_S, self._arrive, turn, placed, ticket, wire_id)

    def _arrive(
        self, turn: PoolTurn, placed: PlacedRequest, ticket: PlacementTicket, wire_id: str
    ) -> None:
        """The request is at its decode worker."""
        clock, chosen = self._clock, placed.choice.chosen
        decode = self._workers[chosen.decode]
        self.submits_seen[chosen.decode] += 1
        decode.promise(turn)

        def compute() -> None:
            self._workers[chosen.p.instance].compute(turn, chosen, hand_over)

        def hand_over() -> None:
            tail_s = 0.0 if chosen.prefill is None else CHUNK * KV_BYTES / LINK_BYTES_S
            clock.at(clock.now + 2 * PATH_S, self._on_first, turn, placed, ticket)
            clock.at(clock.now + PATH_S + tail_s, join)

        def join() -> None:
            ticket.on_tokens()
            decode.decode(turn, end)

        def end() -> None:
            clock.at(clock.now + PATH_S, self._on_end, turn, placed, ticket, wire_id)

        clock.at(clock.now + (0.0 if chosen.prefill is None else PATH_S), compute)

    def _on_first(self, turn: PoolTurn, placed: PlacedRequest, ticket: PlacementTicket) -> None:
        chosen, turn.first_s = placed.choice.chosen, self._clock.now
        observed_s, predicted_s = turn.first_s - turn.submitted, chosen.ttft_s
        self.errors.append(abs(predicted_s / observed_s - 1))
        predicted_s /= chosen.p.correction
        self._estimates.record_first_token(chosen.p.instance, predicted_s, observed_s)
        ticket.on_tokens()

    def _on_end(
        self, turn: PoolTurn, placed: PlacedRequest, ticket: PlacementTicket, wire_id: str
    ) -> None:
        turn.end_s = self._clock.now
        ticket.release()
        output = pb.Output(id=wire_id, finish=pb.FINISH_LENGTH)
        placed.link._dispatch(pb.WorkerMessage(outputs=[output]))
        self._estimates.outputs.record(TENANT.name, MAX_TOKENS, turn.output)
        turn.on_end()
