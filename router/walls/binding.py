"""Decides which resource limits a pool of workers (its binding wall), from the workers'
utilisation.

    too few KV pages, and compute is not full       -> capacity
    sequences wait for KV, and the link is in use   -> network
    steps run less than half of the time            -> none: idle
    compute or bandwidth, whichever is used more    -> that one, from a quarter of its ceiling on
    neither                                         -> none: overhead

The first two come first because they leave an engine idle. Below a quarter of every ceiling the
overhead of a step is the limit: launches, Python, sampling. The router shows the walls of both
pools in its metrics (``WallGauges``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple, TypeAlias

import msgspec
from prometheus_client import CollectorRegistry, Gauge

from protocol.registry.directory import WALLS, Wall, WorkerRecord, WorkerUtilisation
from router.walls.techniques import PoolProfile, Technique, rank_techniques

ROLES = ("prefill", "decode")
NO_WALL = "none"

STARVED = 0.2
"""Share of the time in which pages lack, from which capacity binds ..."""
COMPUTE_FULL = 0.8
"""... unless this much of compute is used: more sequences would only wait for compute instead."""
KV_WAITING = 0.3
"""Mean number of sequences that wait only for KV, from which the network binds, ..."""
LINK_USED = 0.3
"""... if this much of a link is used: otherwise they wait for something else."""
IDLE = 0.5
"""Share of the time in which steps run, below which nothing binds."""
OVERHEAD = 0.25
"""Utilisation below which neither compute nor bandwidth binds."""

UnboundReason: TypeAlias = Literal["", "idle", "overhead"]


class BindingWall(NamedTuple):
    """The wall that binds a pool; None with the reason ``why`` where none does."""

    wall: Wall | None
    why: UnboundReason = ""


class PoolWall(NamedTuple):
    """State of one pool. ``figures`` is None while it has no worker that reports."""

    role: str
    figures: WorkerUtilisation | None
    binding: BindingWall
    techniques: Sequence[Technique]  # those that relax the binding wall, best first


def find_binding_wall(pool: WorkerUtilisation) -> BindingWall:
    """Return the binding wall for the combined utilisation of a pool, see ``combine_workers``."""
    if pool.starved >= STARVED and pool.compute * pool.busy < COMPUTE_FULL:
        return BindingWall("capacity")
    if pool.kv_wait >= KV_WAITING and pool.network >= LINK_USED:
        return BindingWall("network")
    if pool.busy < IDLE:
        return BindingWall(None, "idle")
    wall: Wall = "compute" if pool.compute > pool.bandwidth else "bandwidth"
    return BindingWall(wall) if pool.share_of(wall) >= OVERHEAD else BindingWall(None, "overhead")


def combine_workers(workers: Sequence[WorkerUtilisation]) -> WorkerUtilisation:
    """Combine the figures of at least one worker: the mean; weighted by busy time for figures of
    steps; the maximum for links. A feature counts as on if all workers have it on."""
    assert workers
    first = workers[0]

    def mean(name: str) -> float:
        return sum(float(getattr(w, name)) for w in workers) / len(workers)

    busy = sum(w.busy for w in workers)

    def step_mean(name: str) -> float:
        total = sum(w.busy * float(getattr(w, name)) for w in workers)
        return total / busy if busy else 0.0

    return msgspec.structs.replace(
        first,
        **{name: mean(name) for name in ("seconds", "busy", "capacity", "starved")},
        **{name: step_mean(name) for name in ("compute", "bandwidth", "batch", "kv_share")},
        **{
            name: max(getattr(w, name) for w in workers)
            for name in ("network", "kv_wait", "kv_shrink", "wire_shrink")
        },
        drafts=all(w.drafts for w in workers),
    )


def pool_walls(records: Iterable[WorkerRecord]) -> list[PoolWall]:
    """Return the state of each role's pool. Draining workers do not count."""
    serving = [record for record in records if not record.draining]
    return [_pool_wall(role, [r for r in serving if r.role == role]) for role in ROLES]


def _pool_wall(role: str, workers: list[WorkerRecord]) -> PoolWall:
    known = [record.walls for record in workers if record.walls is not None]
    if not known:
        return PoolWall(role, None, BindingWall(None), [])
    pool = PoolProfile(
        role,
        len(workers),
        combine_workers(known),
        waiting=sum(record.waiting for record in workers),
        max_batch=min(record.max_batch for record in workers),
    )
    bound = find_binding_wall(pool.figures)
    return PoolWall(role, pool.figures, bound, rank_techniques(pool, bound.wall))


class WallGauges:
    """A router's metrics of the walls; the label ``role`` names the pool."""

    def __init__(self, registry: CollectorRegistry, model: str, replica: str) -> None:
        self._model, self._replica = model, replica

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            names = ["model", "role", *labels, "replica"]
            return Gauge(f"baton_{name}", text, names, registry=registry)

        self._binding = gauge(
            "binding_wall", "1: this wall binds the pool; none: none does", "wall"
        )
        self._used = gauge(
            "pool_wall_utilization_ratio",
            "Share of the wall's ceiling that the pool's workers use",
            "wall",
        )
        self._busy = gauge(
            "pool_busy_ratio", "Share of the last seconds in which steps ran, on average"
        )
        self._gains = gauge(
            "wall_gain_ratio",
            "Expected tokens per second of the pool with a technique, over those now",
            *("wall", "technique"),
        )

    def show(self, pools: Iterable[PoolWall]) -> None:
        """Replace all values by those of ``pools``."""
        for gauge in (self._binding, self._used, self._busy, self._gains):
            gauge.clear()
        for pool in pools:
            self._show_pool(pool)

    def _show_pool(self, pool: PoolWall) -> None:
        bound = pool.binding.wall or NO_WALL
        labels = self._model, pool.role
        for wall in (*WALLS, NO_WALL):
            self._binding.labels(*labels, wall, self._replica).set(wall == bound)
        if pool.figures is None:
            return
        for wall in WALLS:
            self._used.labels(*labels, wall, self._replica).set(pool.figures.share_of(wall))
        self._busy.labels(*labels, self._replica).set(pool.figures.busy)
        for technique in pool.techniques:
            self._gains.labels(*labels, bound, technique.name, self._replica).set(technique.gain)
