"""One simulated request, from its arrival to its end.

    placed --P starts--> computing --first token--> computed --KV at D--> joining --row--> decoding
       |                                                                               |
       +--D computes the prompt itself-------------------------------------------------+--> ended

An attempt that a worker's death or a hand-over cuts short begins anew: its context is the prompt
and the tokens that have been emitted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from cluster.simulator.devices.routing import SimulatedRouter
    from cluster.simulator.devices.worker import SimulatedWorker
    from protocol.retry_budget import RetryBudget
    from router.placement.ledger import PlacementTicket


RequestStatus = Literal["ok", "refused", "failed", "too_long", ""]
"""refused: by admission, or because there was no decode worker; failed: workers died, or an
interrupted request found no decode worker in time; "": in progress."""

RequestStage = Literal["placed", "computing", "computed", "joining", "decoding", "ended"]

SimulatedWorkerState = Literal["serving", "changing", "leaving", "gone"]


class SimulatedRequest:
    """Compared and hashed by identity. Times are seconds since the beginning; lengths are tokens.

    ``traffic.py`` creates all requests of a scenario before it runs; ``RequestLifecycle`` changes
    them. ``blocks`` are the keys of the prompt's whole blocks of ``CACHE_BLOCK_TOKENS`` tokens.
    """

    __slots__ = (
        *("number", "at", "prompt", "output", "blocks", "status", "emitted", "first_s", "done_s"),
        *("uncached", "deaths", "attempt", "stage", "prefill", "decode", "context", "left"),
        *("pool_tokens", "expected", "cached", "kv_cached", "tail", "fetched", "ticket", "router"),
        *("predicted_s", "sent_s", "computed_s", "reserved_s", "asked", "death_budget", "counted"),
    )

    number: int
    stage: RequestStage
    status: RequestStatus
    router: SimulatedRouter  # from its arrival on

    def __init__(
        self, number: int, at: float, prompt: int, output: int, blocks: tuple[bytes, ...] = ()
    ) -> None:
        self.number = number
        self.at = at
        self.prompt = prompt
        self.output = output
        self.blocks = blocks
        self.status = ""
        self.emitted = 0
        self.first_s: float | None = None
        self.done_s: float | None = None
        self.uncached = 0  # prompt tokens that were computed for the first token
        self.counted = 0  # output tokens that the counter of the autoscaler knows of
        self.deaths = 0
        self.death_budget: RetryBudget | None = None  # from the first death on
        self.attempt = 0
        self.begin_attempt()

    @property
    def age(self) -> tuple[float, int]:
        """Return the sort key of workers' queues: all attempts of a request are equally old."""
        return self.at, self.number

    def begin_attempt(self) -> None:
        """Reset everything that belongs to one attempt and give the next one a new number."""
        self.attempt += 1
        self.stage = "placed"
        self.prefill: SimulatedWorker | None = None  # None: the decode worker computes the prompt
        self.decode: SimulatedWorker | None = None
        self.context = self.prompt + self.emitted
        self.left = self.output - self.emitted
        self.pool_tokens = 0  # tokens that it takes of the decode worker's pool
        self.expected = 0  # tokens of the context that its router expects to be computed
        self.cached = 0  # tokens of the context that are cached where the prompt is computed
        self.kv_cached = 0  # tokens of the context that are cached at the decode worker
        self.tail = 0  # tokens of the last chunk
        self.fetched = 0
        self.ticket: PlacementTicket | None = None
        self.predicted_s = 0.0
        self.sent_s = 0.0
        self.computed_s: float | None = None
        self.reserved_s: float | None = None
        self.asked = False  # for room at the decode worker

    def continue_locally(self, emitted: int) -> None:
        """Have the decode worker compute the context again, with ``emitted`` more tokens."""
        self.emitted += emitted
        self.context += emitted
        self.left -= emitted
        self.expected = self.context
        self.pool_tokens = self.context + 1
        self.stage = "placed"
        self.prefill = self.computed_s = None

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_s is None else self.first_s - self.at

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds between two output tokens; None with fewer than two tokens."""
        if self.first_s is None or self.done_s is None or self.output < 2 or self.status != "ok":
            return None
        return (self.done_s - self.first_s) / (self.output - 1)


class RequestListener(Protocol):
    """What a worker calls when something happens to a request, or when the worker is empty."""

    def on_started(self, request: SimulatedRequest) -> None:
        """The prompt is being computed by another worker than the one that will decode."""

    def on_computed(self, request: SimulatedRequest) -> None:
        """The first token exists."""

    def on_reserved(self, request: SimulatedRequest) -> None:
        """The decode worker has room for the request's KV."""

    def on_preempted(self, request: SimulatedRequest, given: int) -> None:
        """The decode worker took the request's pages after ``given`` tokens of this attempt beside
        the first (-1: before the first), and will compute its context again."""

    def on_idle(self, worker: SimulatedWorker) -> None:
        """A worker that changes its role or leaves has nothing left to do."""

    def on_finished(self, request: SimulatedRequest) -> None:
        """The last token exists."""
