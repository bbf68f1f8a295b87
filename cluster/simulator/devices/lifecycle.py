"""The way of every simulated request through router and workers.

arrive --router's queue--> enter --> P: started, computed --> D: reserved --> KV carried --> join
              ^                                                                     --> finished
              +---- a worker died, or hands over what it cannot finish ----+
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cluster.observation.request_mix import RequestCounter
from cluster.simulator.devices.clock import SimulatedClock
from cluster.simulator.devices.network import SimulatedNetwork
from cluster.simulator.devices.request import RequestStatus, SimulatedRequest
from cluster.simulator.devices.routing import SimulatedRouter
from cluster.simulator.devices.transfer import KvCarrier, PrefixFetcher
from cluster.simulator.devices.worker import SimulatedWorker
from protocol.retry_budget import DEATH_LIMIT, RetryBudget
from protocol.roles import Role
from router.placement.cost import LOCAL_PATH_S, Placement, usable_tokens

RESUBMIT_S = 10.0
"""How long an interrupted request waits for a decode worker
(``RouterSettings.resubmit_wait_s``)."""


class RequestLifecycle:
    """Implements ``RequestListener`` for all workers; one per simulation.

    ``on_idle`` is called with a worker that leaves or changes its role and is empty.
    ``path_s``: seconds to a prefill worker and back, beyond queue and computing.
    """

    def __init__(
        self,
        clock: SimulatedClock,
        routers: Sequence[SimulatedRouter],
        network: SimulatedNetwork,
        counter: RequestCounter,
        path_s: float,
    ) -> None:
        self.on_idle: Callable[[SimulatedWorker], None] = lambda worker: None
        self.max_tokens: dict[Role, int] = {}  # that the KV pool of one worker holds; 0: unlimited
        self.ended: list[SimulatedRequest] = []
        self.moved = 0  # attempts that began anew without a death
        self.preempted = 0  # sequences whose pages a decode worker took
        self._clock = clock
        self._routers = routers
        self._carrier = KvCarrier(clock, network, self._on_received)
        self._fetcher = PrefixFetcher(clock, network)
        self._counter = counter
        self._path_s = path_s
        self._waiting: list[SimulatedRequest] = []  # interrupted, for a decode worker

    # ---- placement --------------------------------------------------------------------------

    def arrive(self, request: SimulatedRequest) -> None:
        self._counter.arrived(request.prompt)
        request.router = self._routers[request.number % len(self._routers)]
        if self._is_too_long(request):
            self._end(request, "too_long")
        else:
            self._place(request, request.attempt)

    def _is_too_long(self, request: SimulatedRequest) -> bool:
        prompt, limits = request.prompt, self.max_tokens
        return (0 < limits.get("decode", 0) < prompt + request.output) or (
            0 < limits.get("prefill", 0) < prompt + 1
        )

    def _place(self, request: SimulatedRequest, attempt: int) -> None:
        """Place a request. What has been accepted before does not wait for its turn."""
        if request.attempt != attempt or request.status:
            return
        router = request.router
        if request.attempt == 1:  # refused at once where there is no decode worker
            router.queue.enter(request, router.terms.patience, self._enter, self._refuse)
        elif (routed := router.route(request)) is not None:
            self._enter(request, routed.placement)
        else:
            self._waiting.append(request)
            self._clock.at(self._clock.now + RESUBMIT_S, self._give_up, request, attempt)

    def _refuse(self, request: SimulatedRequest) -> None:
        self._end(request, "refused")

    def _give_up(self, request: SimulatedRequest, attempt: int) -> None:
        if request in self._waiting and request.attempt == attempt:
            self._waiting.remove(request)
            self._end(request, "failed")

    def retry_waiting(self) -> None:
        """Place the requests that wait, once there is a decode worker. Until then each one keeps
        the deadline of its interruption."""
        placeable = [r for r in self._waiting if r.router.decode.workers]
        self._waiting = [r for r in self._waiting if not r.router.decode.workers]
        for request in placeable:
            self._place(request, request.attempt)

    def _enter(self, request: SimulatedRequest, chosen: Placement) -> None:
        router, request.sent_s = request.router, self._clock.now
        decode = request.decode = router.decode.named(chosen.decode)
        if chosen.prefill is not None:
            request.prefill = router.prefill.named(chosen.prefill)
        request.pool_tokens = request.context + 1
        router.record_placement(request, chosen)
        computing = request.prefill or decode
        computing.requests[request] = 0
        if chosen.p.fetch is None:
            computing.submit(request)
        else:
            source = router.named(chosen.p.fetch.source)
            self._fetcher.fetch(request, computing, source, chosen.p.fetch)

    # ---- events of workers (RequestListener) ------------------------------------------------

    def on_started(self, request: SimulatedRequest) -> None:
        decode = request.decode
        assert decode is not None
        if request.blocks:
            held = decode.cache.cached_tokens(request.blocks)
            request.kv_cached = usable_tokens(held, request.context)
        after_s = self._carrier.reservation_delay_s(request)
        if after_s > 0:
            self._clock.at(self._clock.now + after_s, self._reserve, request, request.attempt)
        else:
            self._reserve(request, request.attempt)

    def _reserve(self, request: SimulatedRequest, attempt: int) -> None:
        """Ask the decode worker for room, once for each attempt."""
        if request.attempt == attempt and not request.asked and not request.status:
            assert request.decode is not None
            request.asked = True
            request.decode.reserve(request)

    def on_reserved(self, request: SimulatedRequest) -> None:
        self._carrier.open(request)

    def on_computed(self, request: SimulatedRequest) -> None:
        assert request.decode is not None and request.ticket is not None
        now = self._clock.now
        first_s = now + (LOCAL_PATH_S if request.prefill is None else self._path_s)
        request.ticket.on_tokens()
        request.computed_s = now
        if request.first_s is None:
            if request.attempt == 1:
                request.router.record_first_token(request, first_s - request.sent_s)
            request.first_s = first_s
            request.uncached = request.context - request.cached
            cached = min(request.cached, request.prompt)
            self._counter.first_token(request.prompt, cached, first_s - request.at)
        if request.left <= 1:
            self._last_token(request, first_s)
        elif request.prefill is not None:
            request.router.estimates.record_path(
                request.prefill.name, request.decode.name, self._path_s
            )
            if request.asked:
                self._carrier.prompt_computed(request)
            else:
                self._reserve(request, request.attempt)  # sends all of the KV once there is room

    def _on_received(self, request: SimulatedRequest) -> None:
        assert request.prefill is not None and request.decode is not None
        assert request.ticket is not None
        request.ticket.on_tokens()
        request.prefill.release(request)
        request.decode.join(request)

    def on_finished(self, request: SimulatedRequest) -> None:
        self._last_token(request, self._clock.now)

    def on_preempted(self, request: SimulatedRequest, given: int) -> None:
        self.preempted += 1
        request.continue_locally(1 + given)

    # ---- the end of a request or an attempt -------------------------------------------------

    def _last_token(self, request: SimulatedRequest, at: float) -> None:
        assert request.decode is not None
        request.router.release(request)
        if request.prefill is not None and request.stage == "computed":  # a single output token
            self._carrier.close(request)
            request.prefill.drop(request)
        stage, request.stage = request.stage, "ended"
        if stage == "decoding":
            request.decode.release(request)
        else:
            request.decode.drop(request)
        request.done_s = at
        request.router.estimates.outputs.record("", 0, request.output)
        self._end(request, "ok")
        self._counter.grew(request.counted, request.output)
        self._counter.ended(request.prompt, request.output, request.tpot_s)

    def _end(self, request: SimulatedRequest, status: RequestStatus) -> None:
        request.status, request.stage = status, "ended"
        self.ended.append(request)

    def restart(self, request: SimulatedRequest, after_s: float, *, died: bool) -> None:
        """Continue elsewhere from the emitted tokens; too many deaths in a short time fail the
        request."""
        assert request.decode is not None
        request.router.release(request)
        if request.prefill is not None:
            if request.stage in ("placed", "computing", "computed"):
                self._carrier.close(request)
            request.prefill.drop(request)
        given = request.decode.drop(request)
        if request.computed_s is not None:
            request.emitted += 1 + given
        self.moved += not died
        request.begin_attempt()
        if died and self._is_last_death(request):
            self._end(request, "failed")
        else:
            self._clock.at(self._clock.now + after_s, self._place, request, request.attempt)

    def _is_last_death(self, request: SimulatedRequest) -> bool:
        """Count a death under the request; return whether its budget is used up."""
        request.deaths += 1
        if request.death_budget is None:
            request.death_budget = RetryBudget(DEATH_LIMIT)
        request.death_budget.record(self._clock.now)
        return request.death_budget.used_up(self._clock.now)
