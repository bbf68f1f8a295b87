"""What would relax the wall that binds a pool, and by how much: from the pool's own figures.

With ``b`` and ``c`` the utilisations of bandwidth and compute while steps run, and ``k`` the share
of the bytes that KV is, a step is 1 long, of which moving bytes takes ``b``. What moves the share
``s`` of the bytes less takes ``1 - s b`` (Amdahl, 1967), but no less than compute does: ``c``.
Gains are in tokens per second of a pool that has enough to do.

    fp8 weights       s = (1 - k)(1 - 1/e), e the bytes of a weight now
    fp8 KV            s = k (1 - 1/r), r by what it shrinks; where pages lack, r times the sequences
                      for the same bytes: r / max(1, r c)
    speculation       (1 - a^(K+1)) / (1 - a) tokens (Leviathan et al., 2023), for a pass of K + 1
                      rows and K draft tokens: max(1, (K + 1) c) + K d
    larger batch      twice the sequences in max(1 + k b, 2 c)
    fp8 activations   compute takes half: 1 / max(1 - c / 2, b)
    fp8 wire          r times less to bring
    another worker    (n + 1) / n
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from protocol.registry.worker_utilisation import Wall, Walls

LEAST = 1.05
"""Gains below are not worth a word."""

DRAFTED, ACCEPTED, DRAFT_COST = 4, 0.6, 0.1
"""Of a draft model ten times smaller that agrees moderately well: a pool that does not speculate
cannot tell."""


class Technique(NamedTuple):
    """``gain``: expected, as a factor. ``trap``: what it may cost."""

    name: str
    gain: float
    trap: str


class Pool(NamedTuple):
    """``figures``: of all its workers together."""

    role: str
    workers: int
    figures: Walls
    waiting: int = 0  # sequences
    max_batch: int = 0  # of a worker; 0: not known


TRAPS = {
    "fp8 weights": "needs evals; prompts pay for dequantisation",
    "fp8 activations": "needs evals on the tasks that matter",
    "fp8 KV": "accuracy of long contexts; on a CPU reading it costs time",
    "fp8 wire": "KV is rounded to fp8 in the whole cluster",
    "speculation": "a bad draft; pays less the larger the batch",
    "larger batch": "each stream is slower, and takes more KV",
    "another worker": "costs a machine, and splits the prefix cache",
}


def techniques(pool: Pool, wall: Wall | None) -> list[Technique]:
    """Those that relax ``wall``, are not on, and bring something; the best first."""
    found = [] if wall is None else list(_OF[wall](pool))
    return sorted(
        (Technique(name, gain, TRAPS[name]) for name, gain in found if gain >= LEAST),
        key=lambda technique: -technique.gain,
    )


Gains = Iterator[tuple[str, float]]


def _bandwidth(pool: Pool) -> Gains:
    now = pool.figures
    k, b, c = now.kv_share, now.bandwidth, now.compute
    yield "fp8 weights", 1.0 / max(1.0 - (1.0 - k) * (1.0 - 1.0 / now.element_bytes) * b, c)
    yield "fp8 KV", 1.0 / max(1.0 - k * (1.0 - 1.0 / now.kv_shrink) * b, c)
    if pool.role == "decode" and not now.drafts:
        tokens = (1.0 - ACCEPTED ** (DRAFTED + 1)) / (1.0 - ACCEPTED)
        yield "speculation", tokens / (max(1.0, (DRAFTED + 1) * c) + DRAFTED * DRAFT_COST)
    if pool.waiting and now.batch >= 0.9 * pool.max_batch > 0:
        yield "larger batch", 2.0 / max(1.0 + k * b, 2.0 * c)


def _compute(pool: Pool) -> Gains:
    now = pool.figures
    if now.gpu and now.element_bytes == 2:  # elsewhere fp8 is not multiplied any faster
        yield "fp8 activations", 1.0 / max(1.0 - now.compute / 2.0, now.bandwidth)
    yield _another(pool)


def _capacity(pool: Pool) -> Gains:
    r = pool.figures.kv_shrink
    yield "fp8 KV", r / max(1.0, r * pool.figures.compute)
    yield _another(pool)


def _network(pool: Pool) -> Gains:
    yield "fp8 wire", pool.figures.wire_shrink
    yield _another(pool)


def _another(pool: Pool) -> tuple[str, float]:
    return "another worker", (pool.workers + 1) / pool.workers


_OF = {
    "compute": _compute,
    "bandwidth": _bandwidth,
    "capacity": _capacity,
    "network": _network,
}
