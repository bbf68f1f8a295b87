"""Everything that the sizing policy may look at: frozen values that a JSON line holds.

The unit of time is seconds, of lengths tokens, of sizes bytes. A snapshot contains the policy's
memory: the same snapshot gives the same decision on any machine.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

from protocol.performance.speculation_profile import SpeculationProfile
from protocol.roles import Role

WorkerPhase = Literal["warming", "serving", "changing", "leaving"]
"""warming: younger than its warm-up; changing: on its way to another role; leaving: it drains."""


class RequestSample(msgspec.Struct, frozen=True, array_like=True):
    """Requests of one kind: uncached and cached prompt tokens, output tokens, and their number
    relative to the other samples."""

    uncached: float
    cached: float
    output: float
    weight: float = 1.0


class Arrivals(msgspec.Struct, frozen=True, array_like=True):
    """Requests that arrived in successive intervals, the latest last."""

    interval_s: float = 1.0
    counts: tuple[float, ...] = ()


NO_ARRIVALS = Arrivals()


class RequestMix(msgspec.Struct, frozen=True, kw_only=True):
    """The requests of the last window. ``rate``: requests/s, refused and queued ones included.
    ``samples``: of the requests that were answered, or of the last window that had any; empty
    before the first request."""

    rate: float
    window_s: float
    samples: tuple[RequestSample, ...]
    backlog_tokens: float = 0.0  # of prompts in any queue; of those computed, what is left
    residents: float = 0.0  # sequences that decode now
    resident_kv: float = 0.0  # tokens that they hold; 0: unknown
    growth_samples: tuple[float, ...] = ()  # of the load while a worker starts: equally likely
    arrivals: Arrivals = NO_ARRIVALS  # of the last hour


class MachineModel(msgspec.Struct, frozen=True, kw_only=True):
    """The performance model of one pool's workers. ``step``: the fields of a ``StepModel``, the
    coefficients at least."""

    step: tuple[float, ...]
    chunk: int
    max_batch: int
    kv_tokens: int  # size of the KV pool; 0: unknown
    kv_bytes: float  # KV bytes of one token on the wire
    link_bytes_s: float = 0.0  # its share of the network; 0: unknown
    speculation: SpeculationProfile | None = None  # None: nothing drafts


class WorkerSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """One registered worker. ``home``: the pool it was started for. ``role``: the role it serves,
    or will serve when it has changed."""

    instance: str
    home: Role
    role: Role
    state: WorkerPhase = "serving"
    kv_tokens: int = 0  # of live sequences
    gpus: float = 1.0
    busy: float = 0.0  # share of the last seconds in which a step ran
    prompt_tokens_s: float = 0.0  # prompt tokens/s that it computed meanwhile


def staying(workers: Iterable[WorkerSnapshot]) -> list[WorkerSnapshot]:
    """Return the workers that are not leaving."""
    return [worker for worker in workers if worker.state != "leaving"]


class RoleValues(msgspec.Struct, frozen=True, kw_only=True):
    """One number for each role."""

    prefill: float
    decode: float

    def of(self, role: Role) -> float:
        return self.prefill if role == "prefill" else self.decode


class Corrections(RoleValues, frozen=True, kw_only=True):
    """Observed over predicted: times of each role, and ``kv``, the tokens that a resident sequence
    holds."""

    kv: float = 1.0


NO_CORRECTIONS = Corrections(prefill=1.0, decode=1.0)


class WorkerCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of workers of each role."""

    prefill: int
    decode: int

    @classmethod
    def count(cls, roles: Iterable[Role]) -> WorkerCounts:
        """Count one worker for each of ``roles``."""
        counted = list(roles)
        return cls(prefill=counted.count("prefill"), decode=counted.count("decode"))

    def of(self, role: Role) -> int:
        return self.prefill if role == "prefill" else self.decode

    @property
    def total(self) -> int:
        return self.prefill + self.decode


class SloTargets(msgspec.Struct, frozen=True, kw_only=True):
    """Latency objectives in seconds."""

    ttft_s: float
    tpot_s: float


class PoolLimits(msgspec.Struct, frozen=True, kw_only=True):
    """``least`` and ``most`` workers of each role. ``gpus``: most GPUs of all workers together,
    None: no bound."""

    least: WorkerCounts
    most: WorkerCounts
    gpus: float | None = None


class ScalingTuning(msgspec.Struct, frozen=True, kw_only=True):
    """How fast and how carefully the policy scales."""

    loans: bool = True  # workers may serve the other role
    loan_drain_s: float = 2.0  # time of a decode worker's requests to end before it is lent
    down_after_s: float | None = None  # stop what was spare for so long; None: start_s
    down_every_s: float = 20.0  # from one step down to the next
    down_share: float = 0.1  # share of the pool in one step, at least one worker
    start_s: float = 60.0  # duration of a cold start, observed or assumed


class ObservedLatency(msgspec.Struct, frozen=True, kw_only=True):
    """Means of the window as clients saw them; None: no request was answered."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    prompt_tokens: float = 0.0  # of the requests with a first token; 0: as of the mix


class DemandSample(msgspec.Struct, frozen=True, array_like=True):
    """The demand at one time, before limits, and the traffic that it is for."""

    at_s: float
    prefill: int
    decode: int
    rate: float = 0.0  # requests/s
    load: float = 0.0  # uncached prompt tokens/s


class WorkerLevel(msgspec.Struct, frozen=True, array_like=True):
    """The n-th worker of a role, whichever that is: when the demand last was n or more, and the
    seconds to let it idle in addition, because earlier stops did not pay."""

    used_s: float
    extra_s: float = 0.0


class ComparedWork(msgspec.Struct, frozen=True, array_like=True):
    """Sums of what was observed, and of what was expected of the same work without a correction.
    Older work counts less and less. ``requests``: the number of requests that this work was for,
    all told."""

    observed: float = 0.0
    expected: float = 0.0
    requests: float = 0.0


class SizingMemory(msgspec.Struct, frozen=True, kw_only=True):
    """The state that the policy keeps from one decision to the next; it comes with the decision.
    ``growth``: of the load in successive periods of a worker's start, the latest last."""

    past: tuple[DemandSample, ...] = ()
    prefill_levels: tuple[WorkerLevel, ...] = ()
    decode_levels: tuple[WorkerLevel, ...] = ()
    growth: tuple[float, ...] = ()
    growth_s: float | None = None  # end of the last of these periods
    corrections: Corrections = NO_CORRECTIONS
    computed_s: ComparedWork = ComparedWork()  # seconds of the steps of prefill workers
    held_kv: ComparedWork = ComparedWork()  # token-seconds of sequences that decode
    last_down_s: float | None = None
    last_change_s: float | None = None


class SizingSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """One input of the policy. ``at_s``: monotonic time of the caller's clock. ``mix``: None when
    metrics are missing. ``targets``: workers that were asked for, by home; those that are not among
    ``workers`` are starting. ``failed_loans``: instances of which a loan failed within the time of
    a start."""

    at_s: float
    mix: RequestMix | None
    goals: SloTargets
    machines: dict[Role, MachineModel]  # by home, without pools of which nothing is known
    workers: tuple[WorkerSnapshot, ...]
    targets: WorkerCounts
    limits: PoolLimits
    tuning: ScalingTuning = ScalingTuning()
    observed: ObservedLatency = ObservedLatency()
    memory: SizingMemory = SizingMemory()
    failed_loans: tuple[str, ...] = ()
