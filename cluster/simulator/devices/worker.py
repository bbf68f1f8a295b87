"""A simulated worker of either role: its prompts, its steps, its KV pool.

    prefill   queue --KV room--> computing (prefill_steps.py) --> KV held until D has it
    decode    queue --KV room, row--> prompts in steps (steps.py) --+
              reserving --KV room--> (KV arrives) --> joining --row-+--> batch --> finished

Prompts on a decode worker go through its real step policy, step by step. A sequence that decodes
holds its context and the tokens that it was given; when the pool is full, the newest is preempted.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection
from operator import attrgetter

from cluster.simulator.devices.batch import DraftPace
from cluster.simulator.devices.cache import CACHE_BLOCK_TOKENS, SimulatedCache
from cluster.simulator.devices.clock import SimulatedClock
from cluster.simulator.devices.kv_reservations import KvReservations
from cluster.simulator.devices.prefill_steps import PrefillStepRunner
from cluster.simulator.devices.request import (
    RequestListener,
    SimulatedRequest,
    SimulatedWorkerState,
)
from cluster.simulator.devices.steps import StepRunner
from cluster.sizing.snapshot import MachineModel
from protocol.block_keys import BLOCK_TOKENS
from protocol.performance.step_model import StepModel
from protocol.roles import Role
from router.placement.cost import usable_tokens
from router.placement.ledger import QueuedPrompts
from router.placement.prefix_index import PrefixIndex
from router.placement.snapshot import Objectives


class SimulatedWorker:
    """One worker; ``SimulatedFleet`` creates and removes it.

    ``home`` is the pool it was started for, ``role`` what routers see, ``next_role`` its role after
    a change. ``requests`` holds every request that is at the worker or on its way to it.
    """

    def __init__(
        self, number: int, home: Role, machine: MachineModel, clock: SimulatedClock,
        listener: RequestListener, index: PrefixIndex, drafts: DraftPace, goals: Objectives,
    ) -> None:  # fmt: skip
        self.number = number
        self.name = f"{home}-{number}"
        self.home: Role = home
        self.role: Role = home
        self.next_role: Role = home
        self.machine = machine
        self.model = StepModel(*machine.step)
        self.state: SimulatedWorkerState = "serving"
        self.role_changes = 0  # since it was started
        self.asked_s = self.since_s = clock.now
        self.gone_s: float | None = None
        self.queue: list[SimulatedRequest] = []  # by age
        self.cache = SimulatedCache(self.name, index, machine.kv_tokens)
        self.pool = KvReservations(machine.kv_tokens, self.cache, self._on_reserved)
        self.requests = self.pool.requests
        self._steps = StepRunner(self, clock, drafts, goals)
        self.batch = self._steps.batch
        self._prefill = PrefillStepRunner(self, clock)
        self._clock = clock
        self._listener = listener

    @property
    def busy_s(self) -> float:
        return self._prefill.busy_s + self.batch.busy_s

    @property
    def computed_prompts(self) -> tuple[float, int]:
        """Seconds of all steps as a prefill worker, and prompt tokens computed in them."""
        return self._prefill.busy_s, self._prefill.tokens

    @property
    def free_s(self) -> float:
        """End of the last step as a prefill worker."""
        return self._prefill.free_s

    @property
    def uncomputed_prompts(self) -> int:
        return len(self.queue) + len(self._prefill.prompts) + len(self._steps.prompts.requests)

    @property
    def uncomputed_tokens(self) -> int:
        """Tokens of these prompts; of those that have begun, without cached ones."""
        queued = sum(request.context for request in self.queue)
        started = self._started_prompts().items()
        return queued + sum(request.context - done for request, done in started)

    @property
    def reported_prompts(self) -> QueuedPrompts:
        """What routers hear of these prompts. Those that wait count with what their routers expect
        to be computed, as a router subtracts as much for its own ones."""
        started = self._started_prompts()
        queued = sum(request.expected for request in self.queue)
        return QueuedPrompts(
            queued + sum(request.context - done for request, done in started.items()),
            self.uncomputed_prompts,
            sum(done - request.cached for request, done in started.items()),
        )

    def _started_prompts(self) -> dict[SimulatedRequest, int]:
        """Return the tokens computed of each prompt that has begun, cached ones included."""
        return self._prefill.computed_tokens() | self._steps.prompts.requests

    @property
    def decoding(self) -> int:
        """Number of requests that decode here or will."""
        return sum(request.decode is self for request in self.requests)

    @property
    def claimed_tokens(self) -> int:
        """Tokens of the KV pool that live sequences hold or have been promised."""
        return self.pool.used_tokens + self.pool.promised_tokens

    @property
    def unused_tokens(self) -> int:
        """Tokens of the KV pool that no live sequence holds or waits for; 0 of an unlimited one."""
        awaited = self.pool.awaited_tokens + sum(self._pool_tokens(r) for r in self.queue)
        return max(0, self.machine.kv_tokens - self.pool.used_tokens - awaited)

    # ---- prompts ----------------------------------------------------------------------------

    def submit(self, request: SimulatedRequest) -> None:
        """Queue the request's context to be computed here."""
        self.requests.setdefault(request, 0)
        self._enqueue(request)
        self.pump()

    def _enqueue(self, request: SimulatedRequest) -> None:
        bisect.insort(self.queue, request, key=attrgetter("age"))

    def pump(self) -> None:
        """Start the work that can start."""
        if self.state == "gone":
            return
        if self.role == "prefill" or self._prefill.is_running:
            self._prefill.run()
        else:
            self._steps.prompts.requests.update(self._prefill.take_prompts())
            self._steps.reschedule()

    @property
    def can_start_prompt(self) -> bool:
        """Whether the first queued prompt can take part in decode steps now."""
        return (
            bool(self.queue)
            and self.role == "decode"
            and not self._prefill.prompts
            and self._steps.free_rows > 0
            and self._first_fits()
            and not self._waits_for_prefix(self._steps.prompts.requests)
        )

    @property
    def can_admit_prompt(self) -> bool:
        """Whether the first queued prompt can take part in the next prefill step."""
        if self.role != "prefill" or not self.queue:
            return False
        return self._first_fits() and not self._waits_for_prefix(self._prefill.prompts)

    def _first_fits(self) -> bool:
        request = self.queue[0]
        tokens = self._pool_tokens(request)
        if request in self.pool.preempted:  # without a page for each row it would go again at once
            tokens += BLOCK_TOKENS * self.batch.rows
        return self.pool.fits(request, tokens)

    def _waits_for_prefix(self, prompts: Collection[SimulatedRequest]) -> bool:
        """Return whether one of the prompts that are being computed brings the next block of the
        first queued one."""
        keys = self.queue[0].blocks
        if not keys or not prompts:
            return False
        cached = self.cache.cached_tokens(keys) // CACHE_BLOCK_TOKENS
        following = keys[cached : cached + 1]
        return bool(following) and any(p.blocks[cached : cached + 1] == following for p in prompts)

    def start_prompt(self) -> SimulatedRequest:
        """Take the first queued prompt, look up its prefix, and leave one token to compute."""
        request = self.queue.pop(0)
        if request in self.pool.preempted:
            self.pool.evict_preempted(self.batch.added)
            request.fetched = int(self.pool.preempted[request]) // BLOCK_TOKENS * BLOCK_TOKENS
        self.pool.take(request, self._pool_tokens(request))
        self.pool.serve_waiting()
        request.cached = request.context - self.uncached_tokens(request)
        request.tail = (request.context - request.cached - 1) % self.machine.chunk + 1
        request.stage = "computing"
        if request.decode is not self:
            self._listener.on_started(request)
        return request

    def uncached_tokens(self, request: SimulatedRequest) -> int:
        """Return the tokens of a queued prompt that are to be computed, if it starts now."""
        held = self.cache.cached_tokens(request.blocks) if request.blocks else 0
        return request.context - usable_tokens(max(held, request.fetched), request.context)

    def _pool_tokens(self, request: SimulatedRequest) -> int:
        """Return the pool tokens of a prompt; one that decodes elsewhere leaves soon."""
        return request.pool_tokens if request.decode is self else request.context

    def on_progress(self, request: SimulatedRequest, tokens: int) -> None:
        """Cache the whole blocks of the first ``tokens``, which other prompts may wait for."""
        self.cache.insert(request.blocks[: tokens // CACHE_BLOCK_TOKENS])

    def on_computed(self, request: SimulatedRequest) -> bool:
        request.stage = "computed"
        if request.blocks:
            self.cache.insert(request.blocks)
        self._listener.on_computed(request)
        return request.decode is self and request.left > 1

    # ---- KV from a prefill worker -----------------------------------------------------------

    def reserve(self, request: SimulatedRequest) -> None:
        """Reserve room for the request's KV; the listener hears of it, now or later."""
        self._steps.settle()
        self.pool.reserve(request)
        self._steps.reschedule_before_overflow()

    def _on_reserved(self, request: SimulatedRequest) -> None:
        request.reserved_s = self._clock.now
        self._listener.on_reserved(request)

    def join(self, request: SimulatedRequest) -> None:
        """Decode a request whose whole KV has arrived."""
        if request.blocks:
            self.cache.insert(request.blocks)
        self._steps.join(request)

    def preempt(self, request: SimulatedRequest, given: int, computed: int | None = None) -> None:
        """Take the pages of a request, and compute its context again when it fits. ``given``: as in
        ``on_preempted``. ``computed``: tokens of the context; None: all."""
        self._listener.on_preempted(request, given)
        computed = request.context if computed is None else computed
        self.pool.preempt(request, computed, self.batch.added)
        self.pool.promise(request)
        self._enqueue(request)

    # ---- the end of a request ---------------------------------------------------------------

    def on_finished(self, request: SimulatedRequest) -> None:
        self._listener.on_finished(request)

    def release(self, request: SimulatedRequest) -> None:
        """Forget a request that is done here; queued work may get its room."""
        if self.pool.release(request) and self.queue:
            self.pump()
        if self.state != "serving" and not self.requests:
            self._listener.on_idle(self)

    def drop(self, request: SimulatedRequest) -> int:
        """Give up a request in whatever stage it is here; return the tokens it was given."""
        given = 0
        if request.stage == "decoding" and request.decode is self:
            given = self._steps.leave(request)
        elif not self._drop_prompt(request):
            self.pool.stop_waiting(request)
            self._steps.stop_waiting(request)
        self.release(request)
        self.pool.serve_waiting()  # it may have been the first one, and there was room for others
        self.pump()
        return max(0, given)

    def _drop_prompt(self, request: SimulatedRequest) -> bool:
        """Return whether the request's prompt was to be computed here."""
        in_steps = self._prefill.prompts, self._steps.prompts.requests
        if request in self.queue:
            self.queue.remove(request)
            return True
        return any(prompts.pop(request, None) is not None for prompts in in_steps)
