"""All that the policy may look at. Frozen values that a JSON line holds; seconds, tokens, bytes.

A snapshot with its memory is everything: the same one gives the same decision, on any machine.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from protocol.roles import Role

State = Literal["warming", "serving", "changing", "leaving"]
"""warming: younger than its warm-up; changing: on its way to another role; leaving: it drains."""


class Sample(msgspec.Struct, frozen=True, array_like=True):
    """Requests of one kind: their prompts' uncached and cached tokens, the tokens that they are
    answered with, and how many of them there are, relative to the other samples."""

    uncached: float
    cached: float
    output: float
    weight: float = 1.0


class Mix(msgspec.Struct, frozen=True, kw_only=True):
    """What came over the last window: requests a second, refused and queued ones included, and
    what they were made of. ``samples``: of those that were answered, or of the last window that
    had any; none: nobody has asked yet."""

    rate: float
    window_s: float
    samples: tuple[Sample, ...]
    burst_rate: float = 0.0  # of the last ``burst_s``
    burst_s: float = 0.0  # 0: not known
    pace: float = 1.0  # tokens that a sequence gets in the time of a plain step (tau)
    backlog_tokens: float = 0.0  # of prompts that wait or are under way, cached ones included
    residents: float = 0.0  # sequences that decode now


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """A worker of one pool, as one that computes. ``step``: coefficients as in
    ``router/placement/step_model.py``."""

    step: tuple[float, float, float, float, float]
    chunk: int
    max_batch: int
    kv_tokens: int  # that its pool takes; 0: not known
    kv_bytes: float  # of one token on the wire
    link_bytes_s: float = 0.0  # its share of the network; 0: not known


class Worker(msgspec.Struct, frozen=True, kw_only=True):
    """One that is registered. ``home``: the pool that it was started for; ``role``: which it serves
    (or, while changing, is about to)."""

    instance: str
    home: Role
    role: Role
    state: State = "serving"
    kv_tokens: int = 0  # resident, of live sequences
    gpus: float = 1.0


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """A number for each role."""

    prefill: float
    decode: float

    def of(self, role: Role) -> float:
        return self.prefill if role == "prefill" else self.decode


class Corrections(Pair, frozen=True, kw_only=True):
    """Observed to predicted: seconds of each role, and ``kv``: tokens that a resident holds. What
    lengths of prompts and answers have to do with each other shows only there."""

    kv: float = 1.0


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """Workers of each role."""

    prefill: int
    decode: int

    def of(self, role: Role) -> int:
        return self.prefill if role == "prefill" else self.decode

    @property
    def total(self) -> int:
        return self.prefill + self.decode


class Goals(msgspec.Struct, frozen=True, kw_only=True):
    """Objectives, in seconds."""

    ttft_s: float
    tpot_s: float


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """``least`` and ``most`` of each role; ``gpus``: that all workers may have together, None for
    no bound."""

    least: Counts
    most: Counts
    gpus: float | None = None


class Tuning(msgspec.Struct, frozen=True, kw_only=True):
    """How quick and how careful."""

    loans: bool = True  # workers may serve the other role
    down_after_s: float = 180.0  # down by the largest demand of so long
    lend_after_s: float = 30.0  # what the largest demand of so long leaves free may be lent
    down_every_s: float = 20.0  # one step down in so long
    down_share: float = 0.1  # of the pool in a step, and at least one worker
    start_s: float = 60.0  # what a cold start takes, as seen or assumed


class Observed(msgspec.Struct, frozen=True, kw_only=True):
    """Means of the window as clients saw them; None: nobody was answered."""

    ttft_s: float | None = None
    tpot_s: float | None = None


class Past(msgspec.Struct, frozen=True, array_like=True):
    """The demand at a time, before limits."""

    at_s: float
    prefill: int
    decode: int


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """What the policy keeps from one decision to the next; it comes with the decision."""

    past: tuple[Past, ...] = ()
    corrections: Corrections = Corrections(prefill=1.0, decode=1.0)
    last_down_s: float | None = None
    last_change_s: float | None = None


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """``at_s``: by the clock of whoever asks, monotonic. ``mix``: None when metrics are missing.
    ``targets``: workers that were asked for, by home: those of them that are not among ``workers``
    are starting."""

    at_s: float
    mix: Mix | None
    goals: Goals
    machines: dict[Role, Machine]  # by home; a pool that nothing is known of is left out
    workers: tuple[Worker, ...]
    targets: Counts
    limits: Limits
    tuning: Tuning = Tuning()
    observed: Observed = Observed()
    memory: Memory = Memory()
