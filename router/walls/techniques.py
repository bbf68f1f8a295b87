"""Estimates which techniques would relax the wall that binds a pool, from the pool's own figures.

Let ``b`` and ``c`` be the utilisations of bandwidth and compute while steps run, and ``k`` the
share of KV in the bytes read. A step has length 1, of which reading bytes takes ``b``. A technique
that saves the share ``s`` of the bytes gives a step of ``1 - s b`` (Amdahl, 1967), but not less
than the compute ``c``. Gains are factors of the tokens per second of a saturated pool.

    fp8 weights       s = (1 - k)(1 - 1/e), e the bytes of a weight now
    fp8 KV            s = k (1 - 1/r), r the factor by which KV shrinks; where pages lack, r times
                      the sequences for the same bytes: r / max(1, r c)
    speculation       (1 - a^(K+1)) / (1 - a) tokens (Leviathan et al., 2023), for a pass of K + 1
                      rows and K draft tokens: max(1, (K + 1) c) + K d
    larger batch      twice the sequences in max(1 + k b, 2 c)
    fp8 activations   compute takes half: 1 / max(1 - c / 2, b)
    fp8 wire          r times fewer bytes to transfer
    a worker on another GPU, or on another machine for workers on CPUs: (n + 1) / n. One more worker
                      on the same GPU or the same cores brings nothing: they share the ceiling
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from protocol.registry.directory import Wall, WorkerUtilisation

MIN_GAIN = 1.05
"""Smaller gains are not reported."""

DRAFTED, ACCEPTED, DRAFT_COST = 4, 0.6, 0.1
"""Assumed for a draft model ten times smaller with moderate acceptance: a pool that does not
speculate cannot measure it."""


ANOTHER_GPU = "a worker on another GPU"
ANOTHER_MACHINE = "a worker on another machine"


class Technique(NamedTuple):
    """A technique with its expected gain as a factor, and ``trap``: what it may cost."""

    name: str
    gain: float
    trap: str


class PoolProfile(NamedTuple):
    """A pool, as the estimates see it; ``figures`` combine all its workers."""

    role: str
    workers: int
    figures: WorkerUtilisation
    waiting: int = 0  # sequences
    max_batch: int = 0  # sequences per worker; 0: unknown


TRAPS = {
    "fp8 weights": "quality must be evaluated; prompts become slower by dequantisation",
    "fp8 activations": "quality must be evaluated on your tasks",
    "fp8 KV": "less accuracy in long contexts; slower to read on a CPU",
    "fp8 wire": "KV is rounded to fp8 in the whole cluster",
    "speculation": "depends on the draft's quality; gains less with larger batches",
    "larger batch": "each stream is slower, and more KV is needed",
    ANOTHER_GPU: "costs a GPU, and divides the prefix cache",
    ANOTHER_MACHINE: "costs a machine, and divides the prefix cache; on the same one,"
    " workers compete for its cores",
}


def rank_techniques(pool: PoolProfile, wall: Wall | None) -> list[Technique]:
    """Return the techniques that relax ``wall``, are not on, and gain enough; best first."""
    found = [] if wall is None else list(_BY_WALL[wall](pool))
    return sorted(
        (Technique(name, gain, TRAPS[name]) for name, gain in found if gain >= MIN_GAIN),
        key=lambda technique: -technique.gain,
    )


Gains = Iterator[tuple[str, float]]


def _bandwidth(pool: PoolProfile) -> Gains:
    now = pool.figures
    k, b, c = now.kv_share, now.bandwidth, now.compute
    yield "fp8 weights", 1.0 / max(1.0 - (1.0 - k) * (1.0 - 1.0 / now.element_bytes) * b, c)
    yield "fp8 KV", 1.0 / max(1.0 - k * (1.0 - 1.0 / now.kv_shrink) * b, c)
    if pool.role == "decode" and not now.drafts:
        tokens = (1.0 - ACCEPTED ** (DRAFTED + 1)) / (1.0 - ACCEPTED)
        yield "speculation", tokens / (max(1.0, (DRAFTED + 1) * c) + DRAFTED * DRAFT_COST)
    if pool.waiting and now.batch >= 0.9 * pool.max_batch > 0:
        yield "larger batch", 2.0 / max(1.0 + k * b, 2.0 * c)


def _compute(pool: PoolProfile) -> Gains:
    now = pool.figures
    if now.gpu and now.element_bytes == 2:  # elsewhere fp8 products are not faster
        yield "fp8 activations", 1.0 / max(1.0 - now.compute / 2.0, now.bandwidth)
    yield _another_worker(pool)


def _capacity(pool: PoolProfile) -> Gains:
    r = pool.figures.kv_shrink
    yield "fp8 KV", r / max(1.0, r * pool.figures.compute)
    yield _another_worker(pool)


def _network(pool: PoolProfile) -> Gains:
    yield "fp8 wire", pool.figures.wire_shrink
    yield _another_worker(pool)


def _another_worker(pool: PoolProfile) -> tuple[str, float]:
    name = ANOTHER_GPU if pool.figures.gpu else ANOTHER_MACHINE
    return name, (pool.workers + 1) / pool.workers


_BY_WALL = {
    "compute": _compute,
    "bandwidth": _bandwidth,
    "capacity": _capacity,
    "network": _network,
}
