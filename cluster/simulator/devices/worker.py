"""A simulated worker of either role: its prompts, its steps, its KV pool.

    prefill   queue --KV room--> computing (one prompt at a time, in closed form) --> KV held
              until D has it
    decode    queue --KV room, row--> prompts in steps (steps.py) --+
              reserving --KV room--> (KV arrives) --> joining --row-+--> batch --> finished

Prompts on a decode worker go through its real step policy, step by step. A sequence that decodes
holds its context and half of its output from the beginning to the end: this is what it takes on
average, and no sequence is preempted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from cluster.simulator.devices.cache import CACHE_BLOCK_TOKENS, SimulatedCache
from cluster.simulator.devices.clock import SimulatedClock
from cluster.simulator.devices.request import (
    RequestListener,
    SimulatedRequest,
    SimulatedWorkerState,
)
from cluster.simulator.devices.steps import StepRunner
from cluster.sizing.snapshot import MachineModel
from protocol.performance.step_model import StepModel
from protocol.roles import Role
from router.placement.cost import usable_tokens
from router.placement.prefix_index import PrefixIndex
from router.placement.snapshot import Objectives


class KvReservations:
    """What live sequences hold of a worker's KV pool, and the requests that wait for room.

    ``requests``: the tokens of each request of the worker. ``tokens``: size of the pool; 0 means
    unlimited. ``on_reserved`` is called for each request that gets room, in the order in which
    they asked. The rest of the pool is prefix cache.
    """

    def __init__(
        self, tokens: int, cache: SimulatedCache, on_reserved: Callable[[SimulatedRequest], None]
    ) -> None:
        self.requests: dict[SimulatedRequest, int] = {}
        self.used_tokens = 0
        self.cache = cache
        self._tokens = tokens
        self._on_reserved = on_reserved
        self._waiting: deque[SimulatedRequest] = deque()

    def fits(self, tokens: int) -> bool:
        """Return whether ``tokens`` fit; a single request does, as admission checked its length."""
        used = self.used_tokens
        return not used or not self._tokens or used + tokens <= self._tokens

    def take(self, request: SimulatedRequest, tokens: int) -> None:
        self.requests[request] = tokens
        self.used_tokens += tokens
        self.cache.reserve(tokens - min(tokens, len(request.blocks) * CACHE_BLOCK_TOKENS))

    def release(self, request: SimulatedRequest) -> bool:
        """Drop a request; return whether this freed tokens, which waiting requests then get."""
        tokens = self.requests.pop(request, 0)
        if not tokens:
            return False
        self.used_tokens -= tokens
        self.cache.reserve(min(tokens, len(request.blocks) * CACHE_BLOCK_TOKENS) - tokens)
        while self._waiting and self.fits(self._waiting[0].pool_tokens):
            self._reserve(self._waiting.popleft())
        return True

    def reserve(self, request: SimulatedRequest) -> None:
        """Reserve all tokens that the request will hold, now or when there is room."""
        if not self._waiting and self.fits(request.pool_tokens):
            self._reserve(request)
        else:
            self._waiting.append(request)

    def _reserve(self, request: SimulatedRequest) -> None:
        self.take(request, request.pool_tokens)
        self._on_reserved(request)

    def stop_waiting(self, request: SimulatedRequest) -> None:
        if request in self._waiting:
            self._waiting.remove(request)


class SimulatedWorker:
    """One worker; ``SimulatedFleet`` creates and removes it.

    ``home`` is the pool it was started for, ``role`` what routers see, ``next_role`` its role after
    a change. ``requests`` holds every request that is at the worker or on its way to it.
    """

    def __init__(
        self, number: int, home: Role, machine: MachineModel, clock: SimulatedClock,
        listener: RequestListener, index: PrefixIndex, pace: float, goals: Objectives,
    ) -> None:  # fmt: skip
        self.number = number
        self.name = f"{home}-{number}"
        self.home: Role = home
        self.role: Role = home
        self.next_role: Role = home
        self.machine = machine
        self.model = StepModel(*machine.step)
        self.state: SimulatedWorkerState = "serving"
        self.asked_s = self.since_s = clock.now
        self.gone_s: float | None = None
        self.queue: deque[SimulatedRequest] = deque()
        self.queued_tokens = 0
        self.free_s = 0.0  # until then it computes a prompt in closed form
        self.cache = SimulatedCache(self.name, index, machine.kv_tokens)
        self._pool = KvReservations(machine.kv_tokens, self.cache, self._on_reserved)
        self.requests = self._pool.requests
        self._steps = StepRunner(self, clock, machine, self.model, pace, goals)
        self.batch = self._steps.batch
        self._prefill_busy_s = 0.0
        self._clock = clock
        self._listener = listener
        self._computing: SimulatedRequest | None = None

    @property
    def busy_s(self) -> float:
        return self._prefill_busy_s + self.batch.busy_s

    @property
    def uncomputed_prompts(self) -> int:
        in_steps = len(self._steps.prompts.requests)
        return len(self.queue) + (self._computing is not None) + in_steps

    @property
    def used_tokens(self) -> int:
        """Tokens of the KV pool that live sequences hold."""
        return self._pool.used_tokens

    # ---- prompts ----------------------------------------------------------------------------

    def submit(self, request: SimulatedRequest) -> None:
        """Queue the request's context to be computed here."""
        self.requests.setdefault(request, 0)
        self.queue.append(request)
        self.queued_tokens += request.context
        self.pump()

    def pump(self) -> None:
        """Start the work that can start."""
        if self._computing is not None or self.state == "gone":
            return
        if self.role == "decode":
            self._steps.reschedule()
        elif self.queue and self._pool.fits(self._pool_tokens(self.queue[0])):
            request = self._computing = self.start_prompt()
            missing = request.context - request.cached
            seconds = self.model.prefill_s(request.cached, missing, self.machine.chunk)
            self._prefill_busy_s += seconds
            self.free_s = self._clock.now + seconds
            self._clock.at(self.free_s, self._on_prefilled, request, request.attempt)

    @property
    def can_start_prompt(self) -> bool:
        """Whether the first queued prompt can take part in decode steps now."""
        return (
            bool(self.queue)
            and self._computing is None
            and self.role == "decode"
            and self._steps.free_rows > 0
            and self._pool.fits(self._pool_tokens(self.queue[0]))
        )

    def start_prompt(self) -> SimulatedRequest:
        """Take the first queued prompt, look up its prefix, and leave one token to compute."""
        request = self.queue.popleft()
        self._pool.take(request, self._pool_tokens(request))
        held = self.cache.cached_tokens(request.blocks) if request.blocks else 0
        request.cached = usable_tokens(max(held, request.fetched), request.context)
        request.tail = (request.context - request.cached - 1) % self.machine.chunk + 1
        request.stage = "computing"
        if request.decode is not self:
            self._listener.on_started(request)
        return request

    def _pool_tokens(self, request: SimulatedRequest) -> int:
        """Return the pool tokens of a prompt; one that decodes elsewhere leaves soon."""
        return request.pool_tokens if request.decode is self else request.context

    def _on_prefilled(self, request: SimulatedRequest, attempt: int) -> None:
        if self._computing is not request or request.attempt != attempt:
            return
        self._computing = None
        self.on_computed(request)
        self.pump()

    def on_computed(self, request: SimulatedRequest) -> bool:
        self.queued_tokens -= request.context
        request.stage = "computed"
        if request.blocks:
            self.cache.insert(request.blocks)
        self._listener.on_computed(request)
        return request.decode is self and request.left > 1

    # ---- KV from a prefill worker -----------------------------------------------------------

    def reserve(self, request: SimulatedRequest) -> None:
        """Reserve room for the request's KV; the listener hears of it, now or later."""
        self._pool.reserve(request)

    def _on_reserved(self, request: SimulatedRequest) -> None:
        request.reserved_s = self._clock.now
        self._listener.on_reserved(request)

    def join(self, request: SimulatedRequest) -> None:
        """Decode a request whose whole KV has arrived."""
        if request.blocks:
            self.cache.insert(request.blocks)
        self._steps.join(request)

    # ---- the end of a request ---------------------------------------------------------------

    def on_finished(self, request: SimulatedRequest) -> None:
        self._listener.on_finished(request)

    def release(self, request: SimulatedRequest) -> None:
        """Forget a request that is done here; queued work may get its room."""
        if self._pool.release(request) and self.queue:
            self.pump()
        if self.state != "serving" and not self.requests:
            self._listener.on_idle(self)

    def drop(self, request: SimulatedRequest) -> int:
        """Give up a request in whatever stage it is here; return the tokens it was given."""
        given = 0
        if request.stage == "decoding" and request.decode is self:
            given = self._steps.leave(request)
        elif self._drop_prompt(request):
            self.queued_tokens -= request.context
        else:
            self._pool.stop_waiting(request)
            self._steps.stop_waiting(request)
        self.release(request)
        self.pump()
        return max(0, given)

    def _drop_prompt(self, request: SimulatedRequest) -> bool:
        """Return whether the request's prompt was to be computed here."""
        prompts = self._steps.prompts
        if self._computing is request:
            self._computing = None
        elif request in self.queue:
            self.queue.remove(request)
        elif request in prompts.requests:
            prompts.remove(request)
        else:
            return False
        return True
